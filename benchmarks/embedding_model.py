"""Random BERT with mean pooling, and texts for it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np

VOCAB_SIZE = 30_522
NUM_SPECIAL = 2


def make_model(folder: Path, num_layers: int, hidden_size: int, dtype: str = "float32") -> Path:
    """Write a random BERT as sentence-transformers keeps it, unless the folder exists. dtype: of its weights."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel

    if folder.exists():
        return folder
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
    )
    base, unfinished = folder.with_name(f"{folder.name}.base"), folder.with_name(f"{folder.name}.unfinished")
    BertModel(config).eval().to(getattr(torch, dtype)).save_pretrained(base)
    _write_tokenizer(base)
    modules = [Transformer(str(base)), Pooling(hidden_size, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(unfinished))
    shutil.rmtree(base)
    unfinished.rename(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of BERT's kind in which each word of the texts is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words = {f"w{index}": index for index in range(len(special), VOCAB_SIZE)}
    fast = Tokenizer(models.WordPiece({**special, **words}, unk_token="[UNK]"))
    fast.add_special_tokens(list(special))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)


def make_texts(count: int, shortest: int, longest: int) -> list[str]:
    """Texts whose numbers of tokens are spread evenly, in ascending order."""
    draw = random.Random(0)
    lengths = np.linspace(shortest, longest, count).round().astype(int).tolist()
    return [" ".join(f"w{draw.randrange(10, VOCAB_SIZE)}" for _ in range(length - NUM_SPECIAL)) for length in lengths]


def num_tokens_of(text: str) -> int:
    return len(text.split()) + NUM_SPECIAL
