"""Small random encoder-decoder models, and their requests: the oracle is Transformers' own model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from penstock.contract import ArrayBytes, Parts
from penstock.engine.core.engine_core import EngineCore
from penstock.features.encoder_decoder.messages import SourcePart
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.engines import TOLERANCE, Result, add, finish, greedy, random_prompts
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.transformers_models import randomise

START = 2
_BART = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 112,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": START,
    "n_positions": 64,
}
# Classes and configurations by family.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "marian": (
        "MarianConfig",
        "MarianMTModel",
        {**_BART, "activation_function": "swish", "scale_embedding": True},
    ),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "plbart": ("PLBartConfig", "PLBartForConditionalGeneration", _BART),
    "blenderbot": (
        "BlenderbotConfig",
        "BlenderbotForConditionalGeneration",
        _BART,
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "t5-gated": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", _T5),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
            "num_mel_bins": 20,
            "max_source_positions": 30,
            "max_target_positions": 64,
            "begin_suppress_tokens": None,
        },
    ),
    "m2m_100": ("M2M100Config", "M2M100ForConditionalGeneration", _BART),
}


@dataclass(frozen=True)
class Asked:
    """A request: the encoder's tokens, and those that the decoder's text begins with."""

    source: list[int]
    decoder: list[int] = field(default_factory=lambda: [START])

    def part(self) -> SourcePart:
        return SourcePart(length=len(self.source), token_ids=self.source)

    def oracle_inputs(self) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([self.source])}


@dataclass(frozen=True)
class AskedOfAudio:
    """A request about a spectrogram, [bins, frames], with two frames for each position."""

    features: Tensor
    decoder: list[int] = field(default_factory=lambda: [START])

    def part(self) -> SourcePart:
        length = self.features.shape[1] // 2
        return SourcePart(length=length, features=ArrayBytes.of(self.features.numpy()))

    def oracle_inputs(self) -> dict[str, Tensor]:
        return {"input_features": self.features.unsqueeze(0)}


SOURCES = random_prompts((5, 17, 40, 1, 64, 33, 16, 24), VOCAB_SIZE, seed=1)
DECODERS = [
    [START],
    [START, 5],
    [START, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    [START],
    [START],
    [START, 20],
    [START],
    [START],
]
ASKED = [Asked(source, decoder) for source, decoder in zip(SOURCES, DECODERS, strict=True)]
ASKED_OF_AUDIO = [
    AskedOfAudio(torch.randn(20, 60, generator=torch.Generator().manual_seed(seed)), decoder)
    for seed, decoder in enumerate(DECODERS[:4])
]


def asked_of(family: str) -> list[Any]:
    """Requests for a family's model."""
    return list(ASKED_OF_AUDIO if family == "whisper" else ASKED)


def tiny_encoder_decoder(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Transformers' model in float32 with eager attention; all weights random, so that each of them matters."""
    config_class, architecture, fields = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**fields, **overrides})
    config._attn_implementation = "eager"
    model = randomise(getattr(transformers, architecture)(config), seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and architecture.startswith(("T5", "MT5")):
                # Logits are not scaled, and large ones are less exact.
                module.weight.mul_(0.2 if len(module.weight) == config.vocab_size else 1)
            if hasattr(module, "create_weight"):  # a table that is computed
                module.weight.copy_(module.create_weight())
    return model.eval()


def write_encoder_decoder(folder: Path, family: str = "bart", **overrides: Any) -> Path:
    """A saved `tiny_encoder_decoder`."""
    return save_checkpoint(tiny_encoder_decoder(family, **overrides), folder).folder


def run(core: EngineCore, asked: Sequence[Any], max_tokens: int = 12, **fields: Any) -> list[Result]:
    """Run all requests at once; results in order."""
    for index, one in enumerate(asked):
        params = greedy(max_tokens, **{"logprobs": 3, **fields})
        add(core, f"r{index}", one.decoder, params, parts=Parts.of([one.part()]))
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(asked))]


def assert_as_the_oracle(oracle: PreTrainedModel, asked: Any, result: Result) -> None:
    """Every token is the oracle's best after the ones before it, and its log-probabilities are the oracle's."""
    assert result.error is None, result.error
    inputs: Mapping[str, Tensor] = asked.oracle_inputs()
    with torch.no_grad():
        decoder = torch.tensor([[*asked.decoder, *result.tokens]])
        logits = oracle(**inputs, decoder_input_ids=decoder).logits[0].float()
    logits = logits[len(asked.decoder) - 1 : -1]
    for row, token in zip(logits, result.tokens, strict=True):
        assert float(row.max() - row[token]) <= TOLERANCE
    for row, logprobs in zip(torch.log_softmax(logits, dim=-1), result.logprobs, strict=bool(result.logprobs)):
        for token, value in logprobs.items():
            assert abs(float(row[token]) - value) <= TOLERANCE


def tone(seconds: float, rate: int = 16_000, frequency: float = 440.0) -> np.ndarray:
    """A tone that rises, with a little noise."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).normal(size=len(times))
    return (0.3 * np.sin(2 * np.pi * frequency * times * (1 + times)) + 0.01 * noise).astype(np.float32)


def write_whisper(folder: Path, **overrides: Any) -> tuple[Path, PreTrainedModel]:
    """A saved model of speech of a second, with its feature extractor; and the oracle."""
    model = tiny_encoder_decoder("whisper", max_source_positions=50, **overrides)
    save_checkpoint(model, folder)
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(folder)
    return folder, model


# Special tokens of the model of `write_speech_model`, from 380 on; timestamps of a second follow the last.
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
SPECIAL_IDS = {name: number for number, name in enumerate(SPECIAL, 380)}
SPEECH_RULES = {
    "decoder_start_token_id": SPECIAL_IDS["<|startoftranscript|>"],
    "eos_token_id": SPECIAL_IDS["<|endoftext|>"],
    "lang_to_id": {name: SPECIAL_IDS[name] for name in ("<|en|>", "<|de|>")},
    "task_to_id": {name: SPECIAL_IDS[f"<|{name}|>"] for name in ("translate", "transcribe")},
    "no_timestamps_token_id": SPECIAL_IDS["<|notimestamps|>"],
    "suppress_tokens": [7, 8, *range(381, 380 + len(SPECIAL))],
    "begin_suppress_tokens": [220, 380],
    "max_initial_timestamp_index": 25,
    "alignment_heads": [[1, 0], [2, 1], [2, 3]],
}
FIRST_STAMP = 380 + len(SPECIAL)


def write_speech_model(folder: Path) -> PreTrainedModel:
    """A saved model of speech of a second, with a tokenizer and Whisper's special tokens; returns the oracle."""
    ids = {"eos_token_id": 380, "bos_token_id": 380, "pad_token_id": 380, "decoder_start_token_id": 381}
    _, model = write_whisper(folder, vocab_size=380 + len(SPECIAL) + 51, seed=3, **ids)
    tokenizer = byte_level_tokenizer(adds_bos=False)
    tokenizer.add_tokens([f" w{number}" for number in range(tokenizer.get_vocab_size(), 380)])
    tokenizer.add_special_tokens(SPECIAL)
    write_tokenizer(folder, tokenizer)
    (folder / "generation_config.json").write_text(json.dumps(SPEECH_RULES))
    return model


def speech_tokens(
    oracle: PreTrainedModel, asked: AskedOfAudio, rules: Mapping[str, Any], timestamps: bool | None, num_tokens: int
) -> list[int]:
    """Greedy tokens of the oracle by Transformers' logits processors, up to the end of the text.

    timestamps: None for no processors.
    """
    begin = len(asked.decoder)
    made: list[Any] = []
    if timestamps is not None:
        made.append(SuppressTokensLogitsProcessor(rules["suppress_tokens"]))
        made.append(SuppressTokensAtBeginLogitsProcessor(rules["begin_suppress_tokens"], begin))
    if timestamps:
        config = GenerationConfig(**{name: rules[name] for name in ("eos_token_id", "no_timestamps_token_id")})
        config.max_initial_timestamp_index = rules["max_initial_timestamp_index"]
        made.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    tokens = torch.tensor([asked.decoder])
    for _ in range(num_tokens):
        with torch.no_grad():
            scores = oracle(**asked.oracle_inputs(), decoder_input_ids=tokens).logits[:, -1].float()
        for processor in made:
            scores = processor(tokens, scores)
        tokens = torch.cat((tokens, scores.argmax(-1, keepdim=True)), dim=1)
        if rules.get("decoder_start_token_id") and int(tokens[0, -1]) == rules["eos_token_id"]:
            break
    return tokens[0, begin:].tolist()
