"""Test doubles of the engine: a fake core with scripted tokens, and small tokenizers."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.config import EngineConfig
from penstock.contract import LogprobsLists, RpcCall
from penstock.engine.messages import BrokerStatus, EngineRequest
from penstock.engine.statistics.step_log import StepLog, StepRecord
from penstock.engine.statistics.step_phases import PhaseTimer
from penstock.errors import ContextTooLong, PenstockError
from penstock.features.weight_transfer.state import RankStatus
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason, SchedulerStats
from penstock.text.tokenizer_files import _QWEN2_WORDS

CORPUS = ["the quick brown fox jumps over the lazy dog, über 日本語 naïve 😀 1234\n"] * 20
BOS, EOS = "<s>", "</s>"

TokenSource = Callable[[EngineRequest, int], int]


def seeded_token(request: EngineRequest, position: int) -> int:
    """Token from the request's seed and the position, never one of the first eight (special) ids."""
    seed = request.sampling_params.seed
    assert seed is not None, "the core must get a seed with every request"
    return 8 + (seed * 31 + position * 7919) % 200


class FakeCore:
    """`CoreClient` whose tokens come from a function.

    tokens: gives a request's token at a position of its output. failing: prompts, by their first token id, whose
    requests end with an error after `fail_after` tokens. on_step: called before each step, to raise or to send signals.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config
        self.max_model_len = 64
        self.vocab_size = 400
        self.is_recovering = False
        self.num_worker_restarts = 0
        self.phases = PhaseTimer()
        self.step_log = StepLog()
        self.start_stage_s: dict[str, float] = {}
        self.kv_cache_bytes = 1 << 20
        self.tokens: TokenSource = seeded_token
        self.failing: set[int] = set()
        self.fail_after = 2
        self.on_step: Callable[[int], None] = lambda step: None
        self.refuses: Callable[[EngineRequest], bool] = lambda request: False
        self.running: dict[str, tuple[EngineRequest, list[int]]] = {}
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.num_closes = 0
        self.num_resets = 0

    def add_request(self, request: EngineRequest) -> None:
        if self.refuses(request):
            raise ContextTooLong("The cache is too small for this one.")
        self.added.append(request)
        self.running[request.req_id] = (request, list(request.output_token_ids))

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        known = [req_id for req_id in req_ids if req_id in self.running]
        self.aborted += known
        for req_id in known:
            del self.running[req_id]
        return [EngineCoreOutput(req_id=req_id, finish_reason=FinishReason.ABORT) for req_id in known]

    def step(self) -> list[EngineCoreOutput]:
        self.num_steps += 1
        self.on_step(self.num_steps)
        outputs = [self._next(request, tokens) for request, tokens in list(self.running.values())]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.req_id]
        return outputs

    def wait_for_work(self) -> None: ...

    def wake(self) -> None: ...

    def on_loss(self, callback: Callable[[], None]) -> None: ...

    def on_admission(self, callback: Callable[[str, PenstockError | None], None]) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.num_resets += 1
        return reset_running_requests or not self.running

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        if call.method_name == "weight_update_status":
            return [RankStatus()]
        assert callable(call.method), "a fake core has no workers with methods"
        return [call.method(self, *call.args, **call.kwargs)]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running_reqs=len(self.running), num_waiting_reqs=0, num_blocks=8, num_used_blocks=2)

    def watch_steps(self, seconds: float) -> None:
        self.step_log.watch(seconds)

    def take_recent_steps(self) -> list[list[StepRecord]]:
        return [self.step_log.take(0.0, is_last=not self.running)]

    def status(self) -> BrokerStatus:
        return BrokerStatus(stats=self.stats(), num_engines=1, num_recovering=0, num_requests=len(self.running))

    def check_health(self) -> None: ...

    def close(self) -> None:
        self.num_closes += 1

    def _next(self, request: EngineRequest, tokens: list[int]) -> EngineCoreOutput:
        if request.prompt_token_ids[0] in self.failing and len(tokens) >= self.fail_after:
            return EngineCoreOutput(req_id=request.req_id, finish_reason=FinishReason.ERROR, error="the logits are NaN")
        token_id = self.tokens(request, len(tokens))
        tokens.append(token_id)
        finish_reason, stop_reason = self._ending(request, tokens)
        return EngineCoreOutput(
            req_id=request.req_id,
            new_token_ids=[token_id],
            new_logprobs=_logprobs(token_id) if request.sampling_params.logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            first_scheduled_time=request.arrival_time + 0.25,
        )

    def _ending(self, request: EngineRequest, tokens: list[int]) -> tuple[FinishReason | None, int | None]:
        params = request.sampling_params
        if tokens[-1] in request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if tokens[-1] in params.stop_token_ids:
            return FinishReason.STOP, tokens[-1]
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        return (FinishReason.LENGTH, None) if len(tokens) >= limit else (None, None)


def _logprobs(token_id: int, num_likeliest: int = 20) -> LogprobsLists:
    """Log-probabilities in which the sampled token is the second most likely."""
    likeliest = [token_id + 1, token_id, *range(300, 300 + num_likeliest - 2)]
    values = [-0.5 * rank for rank in range(1, num_likeliest + 1)]
    return LogprobsLists(
        logprob_token_ids=[[token_id, *likeliest]], logprobs=[[values[1], *values]], sampled_token_ranks=[2]
    )


def scripted(*token_ids: int) -> TokenSource:
    """Script of tokens for every request; the last one is repeated."""
    return lambda request, position: token_ids[min(position, len(token_ids) - 1)]


def install_fake_core(core_class: type[FakeCore] = FakeCore) -> None:
    """Install the fake core in this process's engines, without importing torch."""
    module = types.ModuleType("penstock.engine.core.engine_core")
    module.EngineCore = core_class  # type: ignore[attr-defined]
    sys.modules["penstock.engine.core.engine_core"] = module


def byte_level_tokenizer(*, adds_bos: bool = True, vocab_size: int = 380) -> tokenizers.Tokenizer:
    """Byte-level BPE like that of GPT-2 and Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, "<|user|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def qwen2_like() -> tokenizers.Tokenizer:
    """Tokenizer as the class Qwen2Tokenizer builds it."""
    tokenizer = byte_level_tokenizer(adds_bos=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    return tokenizer


def gpt2_like() -> tokenizers.Tokenizer:
    """Tokenizer as the class GPT2Tokenizer builds it."""
    tokenizer = byte_level_tokenizer(adds_bos=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def byte_fallback_tokenizer(*, strips_leading_space: bool = True) -> tokenizers.Tokenizer:
    """BPE over words with byte tokens for the rest, like that of Llama 2 (or of Gemma, which strips nothing)."""
    vocab = {"<unk>": 0, BOS: 1, EOS: 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pieces = [*"▁abcdefghijklmnopqrstuvwxyz,.", "▁t", "▁th", "▁the", "he", "in", "▁a", "é", "▁▁"]
    vocab |= {piece: 259 + n for n, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("i", "n"), ("▁", "a"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_leading_space:
        parts.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer, **config: object) -> Path:
    """Write a tokenizer folder; `config` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_model(folder: Path, *, longest_context: int = 64, **config: object) -> Path:
    """Write a model folder without weights: the files that are read before a core starts."""
    write_tokenizer(folder, byte_level_tokenizer())
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 400,
        "max_position_embeddings": longest_context,
        "eos_token_id": 1,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def load_fake_core(config: EngineConfig) -> FakeCore:
    """Create the fake core in a core's process, which imports this function by name."""
    return FakeCore(config)
