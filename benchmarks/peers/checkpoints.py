"""Checkpoints with random weights, and the same weights in every engine's own format.

The values are rounded to bfloat16, so the checkpoints in float32 and in bfloat16 are the same model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environments import python_of, repository
from benchmarks.peers.shapes import ModelShape

# Norm weights spread around 1, so that an engine that forgets one gives other tokens.
_MATRIX_STD, _NORM_STD = 0.02, 0.1


def make(work_dir: Path, shape: ModelShape, model_format: str) -> Path:
    """The folder (or file) of a model in a format, made now unless it is there.

    Raises RuntimeError when its maker fails, with the end of what it printed; nothing half-made is left.
    """
    target = work_dir / "models" / shape.name / model_format
    if target.exists():
        return target
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _MAKERS[model_format.partition("-")[0]](work_dir, shape, model_format, unfinished)
    unfinished.rename(target)
    return target


def _write_checkpoint(_work_dir: Path, shape: ModelShape, model_format: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model_format]
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, size in shape.weights():
        values = torch.randn(size, generator=generator)
        values = 1 + values * _NORM_STD if name.endswith("norm.weight") else values * _MATRIX_STD
        weights[name] = values.to(torch.bfloat16).to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**shape.config, "dtype": model_format, "torch_dtype": model_format}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    _write_tokenizer(shape.vocab_size, folder)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Some converters want one; prompts are token ids, so its words mean nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = special + alphabet + [f"w{index}" for index in range(vocab_size - len(special) - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **names})
    )


def convert(work_dir: Path, environment: str, module: str, source: Path, folder: Path, precision: str) -> None:
    """Run a module of `convert` in an environment. Raises RuntimeError with the end of what it printed."""
    command = [str(python_of(work_dir, environment)), "-m", f"benchmarks.peers.convert.{module}"]
    result = subprocess.run(
        [*command, str(source), str(folder), precision], cwd=repository(), capture_output=True, text=True
    )
    if result.returncode != 0:
        end = (result.stdout + result.stderr)[-2000:]
        raise RuntimeError(f"{source.parent.name} could not be converted to {folder.name}: {end}")


def _converter(environment: str, module: str) -> Callable[[Path, ModelShape, str, Path], None]:
    """Conversion of the float32 checkpoint; of the bfloat16 checkpoint where the converter chooses the precision."""

    def converted(work_dir: Path, shape: ModelShape, model_format: str, folder: Path) -> None:
        precision = model_format.partition("-")[2]
        source = make(work_dir, shape, "bfloat16" if precision == "default" else "float32")
        convert(work_dir, environment, module, source, folder, precision)

    return converted


_MAKERS: dict[str, Callable[[Path, ModelShape, str, Path], None]] = {
    "float32": _write_checkpoint,
    "bfloat16": _write_checkpoint,
    "gguf": _converter("llama-cpp", "gguf_file"),
    "openvino": _converter("openvino-convert", "openvino_ir"),
    "ctranslate2": _converter("ctranslate2", "ctranslate2_model"),
}
