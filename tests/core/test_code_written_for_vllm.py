"""Programs as they are written for vLLM, with another import: each runs, or is refused by the feature's name."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from penstock.errors import UnsupportedFeature

SETTINGS = 'dict(model="demo", max_model_len=256, kv_cache_memory_bytes="16MiB")'

RUNNING = {
    "offline": """
        from vllm import LLM, SamplingParams
        prompts = ["Hello, my name is", "The capital of France is"]
        sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
        llm = LLM(**SETTINGS)
        outputs = llm.generate(prompts, sampling_params)
        result = [(output.prompt, output.outputs[0].text) for output in outputs]
        llm.close()
    """,
    "options of a GPU": """
        from vllm import LLM, SamplingParams
        llm = LLM(**SETTINGS, tensor_parallel_size=1, gpu_memory_utilization=0.3, dtype="float", enforce_eager=True,
                  trust_remote_code=True, swap_space=4, disable_log_stats=True, max_num_seqs=8, seed=0,
                  enable_chunked_prefill=True, compilation_config={"level": 0}, tokenizer_mode="auto")
        result = [llm.generate("Hello", SamplingParams(max_tokens=4))]
        llm.close()
    """,
    "token ids and log-probabilities": """
        from vllm import LLM, SamplingParams, TokensPrompt
        with LLM(**SETTINGS) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, stop=None, seed=None)
            outputs = llm.generate([TokensPrompt(prompt_token_ids=[1, 5, 9])], params, use_tqdm=False)
            result = [outputs[0].outputs[0].logprobs[0]]
    """,
    "arguments without use": """
        from vllm import LLM, SamplingParams
        with LLM(**SETTINGS, enable_lora=False, speculative_config=None, quantization=None) as llm:
            params = SamplingParams(max_tokens=4, structured_outputs=None, skip_clone=True)
            result = llm.generate("Hello", params, lora_request=None, priority=None, tokenization_kwargs=None)
            result += llm.generate(prompts=["Hello"], sampling_params=[params])
    """,
    "beam search": """
        from vllm import LLM
        from vllm import BeamSearchParams
        with LLM(**SETTINGS) as llm:
            found = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
            result = found[0].sequences
    """,
    "asynchronous streaming": """
        import asyncio
        from vllm import AsyncEngineArgs, AsyncLLM, SamplingParams
        async def main():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS, enforce_eager=True))
            params, texts = SamplingParams(max_tokens=4), []
            async for output in engine.generate("Hello", params, request_id="1", lora_request=None):
                texts.append(output.outputs[0].text)
            await engine.abort("1")
            engine.shutdown()
            return texts
        result = asyncio.run(main())
    """,
    "features that may be there": """
        from vllm import LLM
        with LLM(**SETTINGS) as llm:
            result = [name for name in ("generate", "chat", "embed", "sleep") if hasattr(llm, name)]
        assert result == ["generate", "chat"]
    """,
}

REFUSED = {
    "LoRA adapters": """
        from vllm import LLM
        LLM(**SETTINGS, enable_lora=True, max_lora_rank=64)
    """,
    "LoRA adapters ": """
        from vllm.lora.request import LoRARequest
    """,
    "speculative decoding": """
        from vllm import LLM
        LLM(**SETTINGS, speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    """,
    "pooling": """
        from vllm import LLM
        LLM(model="demo", runner="pooling")
    """,
    "pooling, embeddings": """
        from vllm import LLM, PoolingParams
    """,
    "sleep mode": """
        from vllm import LLM
        LLM(**SETTINGS, enable_sleep_mode=True)
    """,
    "several devices": """
        from vllm import LLM
        LLM(**SETTINGS, distributed_executor_backend="ray")
    """,
    "more than one worker": """
        from vllm import LLM
        LLM(**SETTINGS, tensor_parallel_size=2)
    """,
    "an FP8 KV cache": """
        from vllm import LLM
        LLM(**SETTINGS, kv_cache_dtype="fp8")
    """,
    "images, audio and video": """
        from vllm import LLM
        with LLM(**SETTINGS) as llm:
            llm.generate("Hello", mm_processor_kwargs={"num_crops": 4})
    """,
    "the best of more outputs": """
        from vllm import SamplingParams
        SamplingParams(n=1, best_of=4)
    """,
}


def run(code: str) -> Any:
    names: dict[str, Any] = {"SETTINGS": eval(SETTINGS)}
    own = textwrap.dedent(code).replace("from vllm.lora.request import", "from vllm import")
    exec(own.replace("from vllm import", "from penstock import"), names)
    return names.get("result")


@pytest.mark.parametrize("name", RUNNING)
def test_a_program_runs_with_another_import(name: str) -> None:
    assert run(RUNNING[name])


@pytest.mark.parametrize("feature", REFUSED)
def test_a_program_is_refused_by_feature(feature: str) -> None:
    with pytest.raises(UnsupportedFeature, match=feature.strip()):
        run(REFUSED[feature])
