"""Imports of vLLM's names: those that work here, and those that are refused, with a part of what is said."""

from __future__ import annotations

# As scripts of vLLM's documentation, and tutorials, have them.
IMPORTS = """
import vllm.sampling_params
from vllm import LLM, SamplingParams
from vllm import EngineArgs, RequestOutput, SamplingParams
from vllm import LLM, EngineArgs, PoolingParams
from vllm import envs
import vllm.envs as envs
from vllm import LLM, PromptType, TextPrompt, TokensPrompt
from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from vllm.config import CompilationConfig
from vllm.config import KVEventsConfig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.config import PoolerConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.renderers.hf import resolve_chat_template
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.entrypoints.llm import LLM
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.inputs.data import TokensPrompt
from vllm.logger import init_logger
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.outputs import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.sampling_params import GuidedDecodingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.sequence import Logprob
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.tokenizers import get_tokenizer
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser
from vllm.utils import FlexibleArgumentParser, random_uuid
from vllm.utils import get_ip, get_open_port
from vllm.utils.network_utils import get_ip, get_open_port
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from vllm.version import __version__
""".strip().splitlines()

REFUSED = {
    "from vllm.assets.image import ImageAsset": "images, audio and video",
    "from vllm.multimodal.utils import fetch_image": "images, audio and video",
    "from vllm.model_executor.models import ModelRegistry": "models and layers of vLLM's",
    "from vllm import ModelRegistry": "models and layers of vLLM's",
    "from vllm.v1.sample.logits_processor import LogitsProcessor": "logits processors of vLLM's interface",
    "from vllm.entrypoints.openai.protocol import ChatCompletionRequest": "the HTTP server",
    "from vllm.distributed.kv_transfer import KVTransferAgent": "KV transfer",
    "from vllm.tool_parsers import ToolParser": "tool parsers of plugins",
    "from vllm.entrypoints.chat_utils import load_chat_template": "a chat template per engine",
    "from vllm.v1.worker.gpu_worker import Worker": "workers of vLLM's interface",
    "from vllm.reasoning import ReasoningParser": "reasoning parsers of plugins",
    "from vllm.benchmarks.datasets import RandomDataset": "benchmarks on datasets",
    "from vllm.envs import VLLM_ATTENTION_BACKEND": "nothing reads here. Use attention_backend",
    "from vllm.envs import VLLM_RINGBUFFER_WARNING_INTERVAL": "docs/options.md explains all options",
}
