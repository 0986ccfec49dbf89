"""Options of the model, and its `config.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.checkpoints.context_length import rope_settings, rope_type_of, stretched_context
from penstock.checkpoints.generation_config import GENERATION_CONFIG_FILE, end_token_ids
from penstock.checkpoints.gguf.folder import check_model_fields
from penstock.checkpoints.json_file import read_json_object, shown
from penstock.checkpoints.multimodal import MultimodalCheckpoint, text_view
from penstock.checkpoints.pooling import PoolingConfig
from penstock.checkpoints.quantized_checkpoint import FP8, MXFP4, quantization_of_checkpoint
from penstock.checkpoints.resolve import SHIPPED_MODELS, resolve_metadata_folder, resolve_model_folder
from penstock.checkpoints.size_limits import MAX_POSITIONS, check_sizes, positive_integer
from penstock.config.checks import check_choice, check_flag, check_integer
from penstock.config.flags import listed
from penstock.config.generation import (
    AUTO_GENERATION_CONFIG,
    check_override,
    generation_config_folder,
)
from penstock.config.hf_overrides import as_fields, overridden, with_overrides
from penstock.config.multimodal import media_limits
from penstock.config.pooling import POOL, read_pooling
from penstock.errors import ConfigError, ModelError

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Built-in output head.
GENERATE = "generate"
CPU_ARITHMETICS = ("auto", "float32", "bfloat16")
MOE_BACKENDS = ("auto", "torch")
MODEL_IMPLS = ("auto", "penstock", "transformers")
NO_QUANTIZATION = "none"
QUANTIZATIONS = ("int8", "int4", NO_QUANTIZATION)
AUTO_LENGTH = "auto"
AUTO_CALIBRATION = "auto"
NO_CALIBRATION = "none"
# File of the model's folder that "auto" takes.
CALIBRATION_FILE = "calibration.jsonl"
# Fields of the longest context, by architecture.
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "model_max_length",
)
# Longest contexts where `config.json` has none of these, by model type: those of Transformers' configuration, or of the
# texts that the first published models were trained with.
_DEFAULT_CONTEXTS = {
    **dict.fromkeys(("bloom", "falcon", "mpt", "mamba", "mamba2", "falcon_mamba"), 2048),
    **dict.fromkeys(("t5", "mt5", "umt5"), 512),
    "recurrent_gemma": 8192,
}
# Model types whose positions are distances alone, or that have none, so that a longer context may be asked for.
_WITHOUT_LIMIT = ("t5", "mt5", "umt5", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma")
# Fields of the hidden size, by architecture.
_HIDDEN_FIELDS = ("hidden_size", "n_embd", "dim", "d_model")
# Fields of the number of layers, by architecture; of the decoder, beside an encoder.
_LAYER_FIELDS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Field of the kinds of all layers, whose number some configurations have in no other way.
_LAYER_LIST = "layers_block_type"
# Model types whose positions begin after that of padding.
_NUMBERED_AFTER_PADDING = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "mpnet",
    "longformer",
    "data2vec-text",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """model: name as the user gave it. folder, tokenizer_folder: folders of its files.
    hf_config: content of `config.json`; of a multimodal one, that of the language model. hf_generation_config: content
    of `generation_config.json`, or empty.
    dtype: dtype of the weights, and on a GPU of activations; "auto" is the checkpoint's.
    cpu_arithmetic: arithmetic of matrix products with bfloat16 weights on the CPU, and of attention over a bfloat16 KV
    cache beside them: "float32" widens what is bfloat16, which is exact; "bfloat16" rounds activations to bfloat16 and
    adds in float32; "auto" is "bfloat16" on a processor that is faster in it.
    batch_invariant: on a GPU, products and attention whose results for a request depend on no other request and on no
    chunk size, which cost speed; on the CPU they never do.
    moe_backend: products of experts on a GPU: "auto" has one Triton launch for those of all experts, where its kernels
    have the weights' format; "torch" runs expert by expert, and reads the numbers of their rows on the host.
    max_model_len: longest context in tokens; None takes the model's, "auto" what fits into memory.
    seed: base of the seeds of requests without one.
    model_impl: implementation of the model; "auto" takes Penstock's if the architecture has one, else Transformers'.
    output_head: use of the hidden states: "generate" samples tokens, "pool" pools as `pooling` says; others are
    registered by plugins, and pool.
    runner: "generate" for text, "pooling" for embeddings, scores and classes; "auto" is what the model was made for.
    convert: what a pooling runner makes of the model: "embed", "classify", or "none" for vectors of tokens only; "auto"
    is what the model was made for.
    pooler_config: how it pools, in place of what its files say: pooling_type, normalize, activation, dimensions,
    classifier_from_token, query_expansion; a dictionary, or JSON.
    quantization: quantisation of linear layers while loading; None keeps the checkpoint's weights; "none" dequantises
    a GGUF file, whose products a CPU computes from its blocks otherwise.
    quantization_calibration: calibration data for quantization "int4", a JSONL file; "auto" is calibration.jsonl of the
    model's folder, if it has one, else a general text that ships, for "int8" too; "none" rounds to nearest.
    generation_config: source of default sampling parameters: "auto" for `generation_config.json` of the model,
    another folder, or "none" (also "vllm") for Penstock's defaults.
    override_generation_config: fields that replace those of `generation_config.json`; None for none.
    hf_config_path: folder or hub id whose `config.json` is taken in place of the model's own, or of a GGUF file's
    metadata.
    mmproj: GGUF file with the encoder of images of a model of GGUF files; None takes one beside the model's file that
    fits it.
    limit_mm_per_prompt: items of each modality that a prompt may have, as a dictionary such as {"image": 2}, or JSON; 0
    for all of them loads no encoder; None allows 999 of each.
    mm_processor_kwargs: options of the model's processor of images, audio and video, for all requests.
    language_model_only: load no encoder, and take text alone.
    enable_prompt_embeds: take prompts that are embeddings (`prompt_embeds`) in place of tokens.
    hf_overrides: fields that replace those of `config.json`, as a dictionary or JSON; None for none. In Python also a
    function that gets Transformers' configuration and returns it changed.
    """

    model: str
    folder: Path
    tokenizer_folder: Path
    hf_config: Mapping[str, Any] = field(repr=False)
    hf_generation_config: Mapping[str, Any] = field(repr=False)
    dtype: str = field(default="auto", metadata=listed(", ".join(DTYPES)))
    cpu_arithmetic: str = "auto"
    batch_invariant: bool = False
    moe_backend: str = "auto"
    max_model_len: int | str | None = field(
        default=None, metadata=listed("Context length  [default: the model's]", metavar="N|auto")
    )
    seed: int = field(default=0, metadata=listed("Base of request seeds", flag="--engine-seed"))
    model_impl: str = "auto"
    output_head: str = GENERATE
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: Mapping[str, Any] | str | None = None
    quantization: str | None = field(
        default=None, metadata=listed("int8, int4: quantize the weights; none: GGUF as floats")
    )
    quantization_calibration: str = AUTO_CALIBRATION
    generation_config: str | Path = AUTO_GENERATION_CONFIG
    override_generation_config: Mapping[str, Any] | None = None
    hf_config_path: str | Path | None = None
    hf_overrides: Mapping[str, Any] | str | None = None
    mmproj: str | Path | None = None
    limit_mm_per_prompt: Mapping[str, Any] | str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    language_model_only: bool = False
    enable_prompt_embeds: bool = False
    pooling: PoolingConfig | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("cpu_arithmetic", self.cpu_arithmetic, CPU_ARITHMETICS)
        check_flag("batch_invariant", self.batch_invariant)
        check_choice("moe_backend", self.moe_backend, MOE_BACKENDS)
        check_choice("model_impl", self.model_impl, MODEL_IMPLS)
        if not isinstance(self.output_head, str):
            raise ConfigError(f"output_head={self.output_head!r} is not valid. Allowed: a name, such as {GENERATE!r}.")
        object.__setattr__(self, "pooling", self._read_pooling())
        check_sizes(self.hf_config, self.config_source)
        _ = self.eos_token_ids  # raises for invalid token ids
        quantized = self.hf_config.get("quantization_config")
        if isinstance(quantized, Mapping) and self.quantization == quantized.get("quant_method"):
            # The option repeats the checkpoint's own method.
            object.__setattr__(self, "quantization", None)
        if self.quantization is not None:
            if isinstance(quantized, Mapping) and self.quantization not in QUANTIZATIONS:
                raise ConfigError(
                    f"quantization={self.quantization!r} is not that of {self.model}, whose weights are quantized "
                    f"already (quantization_config in config.json). Allowed: {quantized.get('quant_method')!r}, or "
                    "leave the option out."
                )
            check_choice("quantization", self.quantization, QUANTIZATIONS)
            if quantized is not None and quantization_of_checkpoint(self.hf_config) not in (FP8, MXFP4):
                raise ConfigError(
                    f"quantization={self.quantization!r} is not valid for {self.model}, whose weights are quantized "
                    "already (quantization_config in config.json). Leave the option out."
                )
        self._check_calibration()
        generation_config_folder(self.generation_config, self.folder)
        check_override(self.override_generation_config)
        check_integer("seed", self.seed, 0)
        check_flag("language_model_only", self.language_model_only)
        check_flag("enable_prompt_embeds", self.enable_prompt_embeds)
        if self.enable_prompt_embeds and (self.pools or self.is_encoder_decoder):
            raise ConfigError(
                f"enable_prompt_embeds=True is not valid for {self.model}, which "
                f"{'pools' if self.pools else 'is an encoder-decoder model'}. Allowed: for decoders that generate text."
            )
        media_limits(self.limit_mm_per_prompt, ())
        if self.max_model_len is None or self.max_model_len == AUTO_LENGTH:
            return
        if isinstance(self.max_model_len, str):
            raise ConfigError(
                f"max_model_len={self.max_model_len!r} is not valid. Allowed: a positive integer, or 'auto'."
            )
        check_integer("max_model_len", self.max_model_len, 1)
        # A model without such a field is refused by the model registry, which knows the architectures.
        is_limited = self.has_longest_context and self.hf_config.get("model_type") not in _WITHOUT_LIMIT
        if is_limited and self.max_model_len > self.longest_context:
            raise ConfigError(
                f"max_model_len={self.max_model_len} is more than the {self.longest_context} positions that "
                f"{self.model} was made for ({self.context_source}). Ask for at most that."
            )

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> ModelConfig:
        """Find the model's folder and read its configuration.

        tokenizer: folder or hub id of another tokenizer than the model's own.
        revision: branch, tag or commit of a hub id.

        options: the fields from `dtype` on.

        Raises ModelNotFound, or ModelError when `config.json` is missing or damaged.
        """
        folder = resolve_model_folder(model, revision, mmproj=options.get("mmproj"))
        generation = generation_config_folder(options.get("generation_config", AUTO_GENERATION_CONFIG), folder)
        hf_config = _read_config(_config_file(folder, options.get("hf_config_path")))
        if options.get("hf_overrides") is not None:
            options["hf_overrides"] = as_fields(options["hf_overrides"], hf_config)
        # An absolute path: ./demo is not the shipped "demo".
        name = model if isinstance(model, str) else str(folder.absolute())
        return cls(
            model=name,
            folder=folder,
            tokenizer_folder=folder if tokenizer is None else resolve_model_folder(tokenizer, option="tokenizer"),
            hf_config=text_view(with_overrides(hf_config, options.get("hf_overrides")), name),
            hf_generation_config=read_json_object(generation / GENERATION_CONFIG_FILE, ModelError, is_optional=True),
            **options,
        )

    @property
    def multimodal(self) -> MultimodalCheckpoint | None:
        """The multimodal model whose language model `hf_config` describes; None for a model of text alone."""
        return MultimodalCheckpoint.of(self.hf_config)

    @property
    def media_limits(self) -> Mapping[str, int]:
        """Items of each modality that a prompt may have; empty for a model of text alone."""
        multimodal = self.multimodal
        if multimodal is None or self.language_model_only:
            return {}
        # What pools takes text alone, but for encoders of images and of texts.
        if self.pools and not (self.pooling is not None and self.pooling.architecture.embeds_images):
            return {}
        return media_limits(self.limit_mm_per_prompt, multimodal.modalities)

    @property
    def config_source(self) -> str:
        """Name of `hf_config` in messages."""
        return f"config.json of {self.model}{overridden(self.hf_overrides)}"

    @property
    def name_elsewhere(self) -> str:
        """Name under which another process finds the model: the given one, or the folder of a hub id."""
        is_given = self.model in SHIPPED_MODELS or Path(self.model).exists()
        return self.model if is_given else str(self.folder)

    @property
    def pools(self) -> bool:
        """Whether requests end with pooled hidden states, without sampling tokens."""
        return self.output_head != GENERATE

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a request's prompt goes to an encoder, and the text is generated by a decoder that attends to it."""
        return bool(self.hf_config.get("is_encoder_decoder")) and not self.pools

    def _read_pooling(self) -> PoolingConfig | None:
        if self.output_head not in (GENERATE, POOL):
            return None
        pooling = read_pooling(
            self.folder,
            self.hf_config,
            runner="pooling" if self.output_head == POOL and self.runner == "auto" else self.runner,
            convert=self.convert,
            pooler_config=self.pooler_config,
        )
        object.__setattr__(self, "output_head", GENERATE if pooling is None else POOL)
        return pooling

    @property
    def calibration_file(self) -> Path | None:
        """File of the calibration data for GPTQ; None without one."""
        if self.quantization != "int4" or self.quantization_calibration == NO_CALIBRATION:
            return None
        if self.quantization_calibration != AUTO_CALIBRATION:
            return Path(self.quantization_calibration).expanduser()
        own = self.folder / CALIBRATION_FILE
        return own if own.is_file() else None

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`.

        Raises ModelError when the configuration names none.
        """
        architectures = self.hf_config.get("architectures")
        if not architectures or not isinstance(architectures, list) or not isinstance(architectures[0], str):
            raise ModelError(
                f"{self.config_source} has architectures={shown(architectures)}. "
                'It must name the model class, such as ["LlamaForCausalLM"].'
            )
        return architectures[0]

    @property
    def vocab_size(self) -> int:
        return self.require_int("vocab_size")

    @property
    def has_longest_context(self) -> bool:
        """Whether `config.json` limits the context."""
        return self._context_field is not None or self.hf_config.get("model_type") in _DEFAULT_CONTEXTS

    @property
    def planned_context(self) -> int:
        """Context length that memory is planned for: `max_model_len`, or the model's longest one."""
        return self.max_model_len if isinstance(self.max_model_len, int) else self.longest_context

    @property
    def longest_context(self) -> int:
        """Longest context of the model in tokens, with rotary scaling."""
        name = self._context_field or _CONTEXT_FIELDS[0]
        context = stretched_context(self.hf_config, self._num_positions) - self._num_unused_positions
        if self.pooling is not None and self.pooling.max_length is not None:
            context = min(context, self.pooling.max_length)
        if context > MAX_POSITIONS:
            raise ModelError(
                f"{self.config_source} has {name}={self.hf_config[name]}, which its rotary scaling "
                f"({shown(rope_settings(self.hf_config))}) makes {context} positions. Allowed: at most "
                f"{MAX_POSITIONS:,}."
            )
        return context

    @property
    def context_source(self) -> str:
        """Fields of `config.json` that give `longest_context`, for messages."""
        name = self._context_field or _CONTEXT_FIELDS[0]
        positions = self._num_positions
        if self._context_field is None:
            return f"the default of {self.hf_config['model_type']}"
        if self.longest_context == positions:
            return name
        if self.pooling is not None and self.longest_context == self.pooling.max_length:
            return f"{self.pooling.max_length} by the tokenizer's files or sentence_bert_config.json"
        if self._num_unused_positions:
            return f"{name}={positions}, of which {self._num_unused_positions} are unused"
        settings = rope_settings(self.hf_config)
        return f"{name}={positions} with rope_type={rope_type_of(settings)!r} and factor={settings['factor']}"

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.require_int(self._first_of(_HIDDEN_FIELDS) or _HIDDEN_FIELDS[0])

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        field, kinds = self._first_of(_LAYER_FIELDS), self.hf_config.get(_LAYER_LIST)
        if field is None and isinstance(kinds, list) and kinds:
            return len(kinds)
        return self.require_int(field or _LAYER_FIELDS[0])

    @property
    def _num_unused_positions(self) -> int:
        """Positions up to that of padding, after which RoBERTa's begin."""
        if self.pooling is None or self.hf_config.get("model_type") not in _NUMBERED_AFTER_PADDING:
            return 0
        padding = self.hf_config.get("pad_token_id")
        return 1 + (padding if isinstance(padding, int) else 1)

    @property
    def _context_field(self) -> str | None:
        return self._first_of(_CONTEXT_FIELDS)

    @property
    def _num_positions(self) -> int:
        """Longest context without rotary scaling."""
        default = _DEFAULT_CONTEXTS.get(str(self.hf_config.get("model_type")))
        if self._context_field is None and default is not None:
            return default
        return self.require_int(self._context_field or _CONTEXT_FIELDS[0])

    def _first_of(self, names: Sequence[str]) -> str | None:
        """First of several field names that `config.json` has."""
        return next((name for name in names if self.hf_config.get(name) is not None), None)

    @property
    def checkpoint_dtype(self) -> str:
        """Dtype of the checkpoint."""
        value = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype") or "float32"
        return str(value).removeprefix("torch.")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence token ids, of generation_config.json if it names any, else of config.json."""
        return end_token_ids(self.hf_generation_config, f"{GENERATION_CONFIG_FILE} of {self.model}") or end_token_ids(
            self.hf_config, self.config_source
        )

    def _check_calibration(self) -> None:
        given = self.quantization_calibration
        if given in (AUTO_CALIBRATION, NO_CALIBRATION):
            return
        if self.quantization != "int4":
            raise ConfigError(
                f"quantization_calibration={given!r} has no meaning for quantization={self.quantization!r}. Give "
                "quantization='int4' with it, or leave it out."
            )
        if not Path(given).expanduser().is_file():
            raise ConfigError(
                f"quantization_calibration={given!r} is not a file. Allowed: a JSONL file of calibration data, "
                f"{AUTO_CALIBRATION!r} or {NO_CALIBRATION!r}."
            )

    def require_int(self, name: str) -> int:
        """A positive integer of `config.json`.

        Raises ModelError when it is missing or something else.
        """
        return positive_integer(self.hf_config, name, self.config_source)


# Options of `ModelConfig.load`, besides the model.
MODEL_OPTIONS = ("tokenizer", "revision", *(one.name for one in fields(ModelConfig) if one.default is not MISSING))


def _config_file(folder: Path, hf_config_path: str | Path | None) -> Path:
    """`config.json` of the option hf_config_path, else of the model's folder. Raises ModelNotFound."""
    if hf_config_path is not None:
        folder, _ = resolve_metadata_folder(hf_config_path, option="hf_config_path")
    return folder / "config.json"


def _read_config(path: Path) -> Mapping[str, Any]:
    if not os.path.lexists(path):
        check_model_fields(path.parent)
        raise ModelError(f"{path} is missing. A model folder holds config.json, weights and a tokenizer.")
    return read_json_object(path, ModelError)
