"""Small random embedding models and rerankers, written by Transformers and sentence-transformers, the oracles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_WORDS = [f"{first}{second}" for first in "bcdfghklm" for second in ("a", "e", "in", "ot", "ur", "ess", "y", "on")]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no"]


def vocabulary(words: Sequence[str]) -> list[str]:
    """Tokens of a tokenizer that knows these words."""
    return [*_SPECIAL, *words]


VOCAB = vocabulary(_WORDS)
_TINY = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_DECODER = {
    **_TINY,
    "vocab_size": len(VOCAB),
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
TINY_ENCODER = {**_TINY, "vocab_size": len(VOCAB), "max_position_embeddings": 130, "pad_token_id": 0}
# Windows shorter than most texts, in two layers of three.
TINY_MODERN_BERT = {
    **TINY_ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 16,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}


def random_text(num_words: int, seed: int = 0) -> str:
    """A text of so many words, one token each."""
    return " ".join(random.Random(seed).choices(_WORDS, k=num_words))


def tokenizer(*, kind: str = "bert", words: Sequence[str] = _WORDS) -> PreTrainedTokenizerFast:
    """A tokenizer of words. kind: "bert" and "roberta" put special tokens around texts; "last" ends a text with one."""
    tokens = {word: index for index, word in enumerate(vocabulary(words))}
    fast = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cls, sep = ("[CLS]", 2), ("[SEP]", 3)
    if kind == "bert":
        fast.post_processor = processors.BertProcessing(sep, cls)
    elif kind == "roberta":
        fast.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=False, add_prefix_space=False)
    else:
        template = {"single": "$A [SEP]", "pair": "$A $B [SEP]"}
        fast.post_processor = processors.TemplateProcessing(**template, special_tokens=[sep])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]
        if kind == "bert"
        else ["input_ids", "attention_mask"],
    )


def random_model(class_name: str, config_name: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A model of Transformers in float32, with random weights that all matter."""
    config = getattr(transformers, config_name)(**fields)
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, class_name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.3
            is_norm = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(values * scale + (1.0 if is_norm else 0.0))
    return model.eval()


def save(model: PreTrainedModel, folder: Path, *, kind: str = "bert") -> Path:
    """Write a model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer(kind=kind).save_pretrained(folder)
    return folder


def sentence_transformer(
    folder: Path,
    model: PreTrainedModel,
    *,
    kind: str = "bert",
    pooling: str = "mean",
    dense: int | None = None,
    normalize: bool = True,
    **options: Any,
) -> Any:
    """Write a model of sentence-transformers, and return the oracle."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    save(model, folder / "base", kind=kind)
    transformer = Transformer(str(folder / "base"))
    transformer.auto_model.config._attn_implementation = "eager"
    modules: list[Any] = [transformer, Pooling(model.config.hidden_size, pooling_mode=pooling)]
    if dense is not None:
        torch.manual_seed(3)
        modules.append(Dense(model.config.hidden_size, dense))
    if normalize:
        modules.append(Normalize())
    oracle = SentenceTransformer(modules=modules, device="cpu", **options)
    oracle.save(str(folder / "model"))
    return oracle


def multi_vector_encoder(
    folder: Path,
    model: PreTrainedModel,
    *,
    kind: str = "bert",
    skipped: Sequence[str] = (),
    prompts: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """Write a late-interaction model of sentence-transformers, and return the oracle. options: of its Transformer."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    save(model, folder / "base", kind=kind)
    transformer = Transformer(str(folder / "base"), query_length=12, document_length=70, **options)
    transformer.model.config._attn_implementation = "eager"
    torch.manual_seed(3)
    dense = Dense(32, 24, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    mask, normalize = MultiVectorMask(skiplist_words=list(skipped)), Normalize(module_input_name="token_embeddings")
    oracle = MultiVectorEncoder(modules=[transformer, dense, mask, normalize], device="cpu", prompts=prompts)
    oracle.save(str(folder / "model"))
    return oracle
