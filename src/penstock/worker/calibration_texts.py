"""Choice of the calibration data: the user's or the model's own, or by default a general text that ships."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.checkpoints.quantized_checkpoint import read_quantized_checkpoint
from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import STATES
from penstock.config.model import AUTO_CALIBRATION, NO_QUANTIZATION
from penstock.device import Device, DtypeChoice
from penstock.errors import ConfigError
from penstock.loader.calibration_text import read_calibration_text
from penstock.loader.loader import build_model
from penstock.models.registry import runs_through_transformers
from penstock.parallel import ParallelState

logger = logging.getLogger(__name__)
GENERAL_TEXT = Path(__file__).resolve().parent.parent / "assets" / "calibration" / "general.jsonl"
_TOKENIZER_FILE = "tokenizer.json"
# Tokens from whose activations smoothing takes the ranges.
MAX_SMOOTHING_TOKENS = 1024
# Tokens times parameters of a forward pass over the general text: some seconds on two cores.
_MAX_WORK = 300e9
_MIN_TOKENS = 128
# Parameters up to which GPTQ reads the general text by default, since its time grows faster than a forward pass's.
_MAX_PARAMETERS_OF_GPTQ = 50_000_000
# Free memory by size of the float model, which is loaded before it is quantised.
_FREE_MEMORY = 2


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """token_ids: of each text. source: for logs. feeds_gptq: whether GPTQ reads them, besides smoothing."""

    token_ids: list[list[int]]
    source: str
    feeds_gptq: bool

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def first(self, count: int) -> list[list[int]]:
        """Select the first texts, up to so many tokens."""
        found: list[list[int]] = []
        for ids in self.token_ids:
            if count <= 0:
                break
            found.append(ids[:count])
            count -= len(ids)
        return found


def find_calibration_texts(
    config: ModelConfig, load_config: LoadConfig, parallel: ParallelState, device: Device, dtype: DtypeChoice
) -> CalibrationTexts | None:
    """Return the calibration data; None to round to nearest, for a reason that is logged unless it was asked for.

    Raises ConfigError for data that cannot be read, or has tokens that the model does not have.
    """
    path = config.calibration_file
    if path is not None:
        texts = read_calibration_text(path, config.tokenizer_folder)
        _check_tokens(texts, path, config)
        return CalibrationTexts(texts, str(path), feeds_gptq=True)
    is_wanted = config.quantization_calibration == AUTO_CALIBRATION
    if config.quantization in (None, NO_QUANTIZATION) or not is_wanted:
        return None
    if read_quantized_checkpoint(config.hf_config, config.model) is not None:
        return None
    why_not = _why_not_general(config, load_config, parallel, device)
    if why_not is None:
        found = _general_texts(config, parallel, device, dtype)
        if isinstance(found, CalibrationTexts):
            return found
        why_not = found
    logger.info("Quantized weights: not calibrated, since %s", why_not)
    return None


def _why_not_general(
    config: ModelConfig, load_config: LoadConfig, parallel: ParallelState, device: Device
) -> str | None:
    """Return the reason against the general text, as a clause; None if it may be read."""
    if device.kind != "cpu":
        return "calibration runs on CPUs"
    if parallel.pipeline.size > 1:
        return "a pipeline stage has some of the layers"
    if load_config.load_format in ("dummy", *STATES):
        return f"the weights have load_format={load_config.load_format!r}"
    if runs_through_transformers(config):
        return "the layers are those of Transformers"
    if not (config.tokenizer_folder / _TOKENIZER_FILE).is_file():
        return f"there is no {_TOKENIZER_FILE} to read the general text with"
    return None


def _general_texts(
    config: ModelConfig, parallel: ParallelState, device: Device, dtype: DtypeChoice
) -> CalibrationTexts | str:
    """Return as many of the general texts as the model's size allows, or the reason why none."""
    num_parameters = sum(parameter.numel() for parameter in build_model(config, parallel).parameters())
    num_bytes = num_parameters * dtype.weights_torch_dtype.itemsize
    free = min(parallel.tensor.gather_values(device.memory_snapshot().free // parallel.tensor.size))
    if num_bytes * _FREE_MEMORY > free:
        return "the float weights, which it needs first, would take more than half of the free memory"
    num_parameters *= parallel.tensor.size
    max_tokens = int(_MAX_WORK / num_parameters)
    if max_tokens < _MIN_TOKENS:
        return f"{num_parameters / 1e9:.1f} billion parameters take long; give quantization_calibration for it"
    encoded = _encoded(config.tokenizer_folder / _TOKENIZER_FILE)
    texts = [ids for ids in encoded if max(ids) < config.vocab_size]
    if not texts:
        return "the tokenizer gives tokens that the model does not have"
    feeds_gptq = config.quantization == "int4" and num_parameters <= _MAX_PARAMETERS_OF_GPTQ
    max_tokens = max_tokens if feeds_gptq else min(max_tokens, MAX_SMOOTHING_TOKENS)
    found = CalibrationTexts(texts, "the general text", feeds_gptq)
    return replace(found, token_ids=found.first(max_tokens))


def _encoded(tokenizer: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer))
    lines = GENERAL_TEXT.read_text(encoding="utf-8").splitlines()
    return [ids for line in lines if (ids := backend.encode(json.loads(line)["text"]).ids)]


def _check_tokens(texts: list[list[int]], path: Path, config: ModelConfig) -> None:
    largest = max(max(text) for text in texts)
    if largest >= config.vocab_size:
        raise ConfigError(
            f"quantization_calibration={str(path)!r} has the token {largest} with the tokenizer in "
            f"{config.tokenizer_folder}, but the model has {config.vocab_size} tokens."
        )
