"""The demo model with the tokens of the harmony format, which are special tokens as in gpt-oss's tokenizer."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

from penstock.checkpoints.resolve import resolve_model_folder
from penstock.structured.llguidance_backend import LLGuidanceBackend
from penstock.text.tokenizer import Tokenizer, load_tokenizer

RETURN = 2
MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
# Words that are one token in gpt-oss's vocabulary.
WORDS = ("assistant", "analysis", "final")
ADDED = {text: 1536 + number for number, text in enumerate((*MARKERS, *WORDS))}
CALL = ADDED["<|call|>"]
ENDS = (RETURN, CALL)
VOCAB_SIZE = 1568
TEMPLATE = (
    "{%- if tools -%}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{%- endif -%}"
    "{%- for message in messages -%}"
    "<|start|>{{ message.role }}<|message|>{{ message.content or '' }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)


def write_harmony_model(folder: Path, *, with_weights: bool = True) -> Path:
    """Write a model folder, with weights for the added tokens unless there are none at all."""
    demo = resolve_model_folder("demo")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((demo / name).read_text()) | {"eos_token_id": list(ENDS)}
        if name == "config.json":
            settings["vocab_size"] = VOCAB_SIZE
        (folder / name).write_text(json.dumps(settings))
    text = (demo / "tokenizer.json").read_text().replace("<|end|>", "<|return|>")
    tokenizer = json.loads(text)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": id, "content": text, "special": text in MARKERS, **plain} for text, id in ADDED.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|return|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if with_weights:
        _write_weights(demo / "model.safetensors", folder / "model.safetensors")
    return folder


def _write_weights(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(source)
    embeddings = weights["model.embed_tokens.weight"]
    added = embeddings[8 : 8 + VOCAB_SIZE - len(embeddings)].clone()
    save_file({**weights, "model.embed_tokens.weight": torch.cat([embeddings, added])}, target, {"format": "pt"})


@functools.cache
def harmony_tokenizer() -> Tokenizer:
    folder = Path(tempfile.mkdtemp(prefix="harmony-tokenizer-"))
    try:
        return load_tokenizer(write_harmony_model(folder, with_weights=False))
    finally:
        shutil.rmtree(folder)


@functools.cache
def harmony_backend() -> LLGuidanceBackend:
    as_json = harmony_tokenizer().as_json()
    assert as_json is not None
    return LLGuidanceBackend(as_json, VOCAB_SIZE, ENDS)


def encode(text: str) -> list[int]:
    return harmony_tokenizer().encode(text, add_special_tokens=False)
