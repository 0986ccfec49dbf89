"""Which cells of the table are refused, and why. All others work, and the tests go through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.errors import UnsupportedArgument
from penstock.worker.capabilities.arrangements import (
    ARRANGEMENTS,
    DCP,
    LAUNCHED,
    LAUNCHED_CORE,
    LAUNCHED_PP,
    PP,
    SP,
    TP,
    Arrangement,
)
from penstock.worker.capabilities.features import (
    ADAPTIVE,
    CALIBRATED,
    EAGLE3,
    FALLBACK,
    GPT2,
    INT4,
    INT8,
    INT8_CACHE,
    OTHER_CACHE,
    QUANTIZED_CHECKPOINTS,
    SERVED,
    SUFFIX,
    Feature,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of a feature in an arrangement on a device: None stands for all. why: a clause. instead: a sentence."""

    why: str
    instead: str
    feature: Feature | None = None
    arrangement: Arrangement | None = None
    device: str | None = None

    def applies(self, feature: Feature, arrangement: Arrangement, device: str) -> bool:
        """Whether it is of this cell."""
        return (
            self.feature in (None, feature)
            and (self.arrangement is None or self.arrangement.name in (arrangement.name, *_all_parts(arrangement)))
            and self.device in (None, device)
        )

    def message(self, config: EngineConfig) -> str | None:
        """What to tell who asks for it with these options, whatever the device; None if these options do not."""
        options = []
        for one in (self.arrangement, self.feature):
            if one is not None:
                asked = one.name if one.asked is None else one.asked(config)
                if asked is None:
                    return None
                options.append(asked)
        on = "" if self.device is None else f" on {self.device}"
        return f"{' with '.join(options)}{on}: {self.why}. {self.instead}"


_ON_CPUS = "collectives are in shared memory, for CPU workers so far"
_BETWEEN_STEPS = "requests would reach the engines of the ranks between different steps"
_PRODUCTS = "kernels for quantized weights are for CPUs so far"
_ROUNDED = "Use device='cpu', or floating-point weights."

REFUSALS = (
    # First, since an engine asks for this first.
    Refusal(_BETWEEN_STEPS, "Use LLM.", SERVED, LAUNCHED),
    Refusal(_ON_CPUS, "Use device='cpu', or tensor_parallel_size=1.", arrangement=TP, device="cuda"),
    Refusal(_ON_CPUS, "Use device='cpu', or pipeline_parallel_size=1.", arrangement=PP, device="cuda"),
    Refusal(
        "the layers of Transformers have no tensor parallelism",
        "Use tensor_parallel_size=1.",
        FALLBACK,
        TP,
    ),
    Refusal(
        "the layers of Transformers have no pipeline parallelism",
        "Use pipeline_parallel_size=1.",
        FALLBACK,
        PP,
    ),
    Refusal(
        "it has as many KV heads as query heads, so no two workers share a KV head",
        "Leave decode_context_parallel_size out.",
        GPT2,
        DCP,
    ),
    Refusal("it has no sequence parallelism yet", "Leave enable_sp out.", GPT2, SP),
    Refusal("it reads auxiliary hidden states of all tokens", "Leave enable_sp out.", EAGLE3, SP),
    Refusal(
        "calibration runs all layers, and a stage has only some of them",
        "Use quantization_calibration='none', or pipeline_parallel_size=1.",
        CALIBRATED,
        PP,
    ),
    Refusal(
        "the engine of every rank needs the sampled tokens, and only the last stage has them",
        "Use tensor_parallel_size.",
        None,
        LAUNCHED_PP,
    ),
    Refusal(_BETWEEN_STEPS, "Leave enable_multiprocessing out, and data_parallel_size too.", None, LAUNCHED_CORE),
    Refusal(
        "it depends on measured times, which differ between ranks",
        "Set 'adaptive': False in speculative_config.",
        ADAPTIVE,
        LAUNCHED,
    ),
    *(
        Refusal(_PRODUCTS, _ROUNDED, feature, device="cuda")
        for feature in (INT8, CALIBRATED, INT4, *QUANTIZED_CHECKPOINTS)
    ),
    *(
        Refusal(
            "the KV cache has the model's dtype on this device",
            "Use kv_cache_dtype='auto', or device='cpu'.",
            feature,
            None,
            "cuda",
        )
        for feature in (INT8_CACHE, OTHER_CACHE)
    ),
    Refusal(
        "it drafts on the host, which does not have the tokens of this device in time",
        "Use speculative_config={'method': 'ngram', ...}, or device='cpu'.",
        SUFFIX,
        device="cuda",
    ),
)


def refusal_of(feature: Feature, arrangement: Arrangement, device: str) -> Refusal | None:
    """Of a cell; None where the engine can do it."""
    return next((one for one in REFUSALS if one.applies(feature, arrangement, device)), None)


def check_options(config: EngineConfig, device: str | None = None) -> None:
    """Refuse, at start and by name, what this combination of options cannot do.

    device: its kind; None finds out, where it matters. Raises UnsupportedArgument.
    """
    for refusal in REFUSALS:
        if refusal.feature is None or refusal.feature.asked is not None:
            _check(refusal, config, device)


def allows_options(config: EngineConfig) -> bool:
    """Whether this combination of options passes `check_options`."""
    try:
        check_options(config)
    except UnsupportedArgument:
        return False
    return True


def check_feature(feature: Feature, config: EngineConfig) -> None:
    """Refuse by name what an engine asks for by its kind, and these options cannot do. Raises UnsupportedArgument."""
    for refusal in REFUSALS:
        if refusal.feature is feature:
            _check(refusal, config, None)


def _check(refusal: Refusal, config: EngineConfig, device: str | None) -> None:
    message = refusal.message(config)
    if message is None:
        return
    if refusal.device is None or refusal.device == (device or _kind_of_device(config)):
        raise UnsupportedArgument(message)


def _all_parts(arrangement: Arrangement) -> Iterator[str]:
    for name in arrangement.parts:
        yield name
        yield from _all_parts(next(one for one in ARRANGEMENTS if one.name == name))


def _kind_of_device(config: EngineConfig) -> str:
    if config.device.device != "auto":
        return config.device.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
