"""Embeddings per second, beside sentence-transformers on the same machine and weights.

    python -m benchmarks.embeddings [--texts 300] [--shortest 16] [--longest 512] [--layers 12] [--hidden 768]
        [--threads N] [--repeats 3] [--output FOLDER]

A random encoder of BERT-base's shape embeds texts of lengths spread evenly between the shortest and the longest.
Penstock runs in float32 and with int8 weights, sentence-transformers in float32; they take turns, and each row has the
median of its turns. Both have the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import described, machine, save
from penstock import LLM

_VOCAB_SIZE = 30_522
_NUM_SPECIAL = 2


def make_model(folder: Path, num_layers: int, hidden_size: int) -> None:
    """Write a random BERT with mean pooling, as sentence-transformers keeps it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
    )
    BertModel(config).eval().save_pretrained(folder / "base")
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words = {f"w{index}": index for index in range(len(special), _VOCAB_SIZE)}
    fast = Tokenizer(models.WordLevel({**special, **words}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder / "base")
    modules = [Transformer(str(folder / "base")), Pooling(hidden_size, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"))


def make_texts(count: int, shortest: int, longest: int) -> list[str]:
    """Texts whose numbers of tokens are spread evenly, in random order."""
    draw = random.Random(0)
    lengths = np.linspace(shortest, longest, count).round().astype(int).tolist()
    draw.shuffle(lengths)
    return [" ".join(f"w{draw.randrange(10, _VOCAB_SIZE)}" for _ in range(length - _NUM_SPECIAL)) for length in lengths]


def measure(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cosine(found: Sequence[Any], expected: np.ndarray) -> float:
    """Smallest cosine between two lists of unit vectors."""
    return float((np.array(found) * expected).sum(1).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("texts", 300), ("shortest", 16), ("longest", 512), ("layers", 12), ("hidden", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = make_texts(args.texts, args.shortest, args.longest)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, args.layers, args.hidden)
        from sentence_transformers import SentenceTransformer

        oracle = SentenceTransformer(str(folder / "model"), device="cpu")
        model = folder / "model"
        with (
            LLM(model, num_threads=args.threads) as float32,
            LLM(model, num_threads=args.threads, quantization="int8") as int8,
        ):
            few = texts[: max(2, len(texts) // 20)]
            expected = oracle.encode(few)
            quality = {
                name: cosine([output.outputs.embedding for output in llm.embed(few, use_tqdm=False)], expected)
                for name, llm in (("float32", float32), ("int8", int8))
            }
            seconds = measure(
                {
                    "sentence-transformers": lambda: oracle.encode(texts, batch_size=32),
                    "float32": lambda: float32.embed(texts, use_tqdm=False),
                    "int8": lambda: int8.embed(texts, use_tqdm=False),
                },
                args.repeats,
            )
    num_tokens = sum(len(text.split()) + _NUM_SPECIAL for text in texts)
    facts = machine(args.threads)
    print(described(facts))
    print(f"{len(texts)} texts, {num_tokens:,} tokens, {args.layers} layers of {args.hidden}, {args.threads} threads")
    for name, taken in seconds.items():
        ratio = seconds["sentence-transformers"] / taken
        speed = f"{len(texts) / taken:7.1f} texts/s  {num_tokens / taken:9,.0f} tokens/s"
        print(f"{name:22} {taken:7.2f} s  {speed}  {ratio:5.2f} x")
    print(f"int8 / float32: {seconds['float32'] / seconds['int8']:.2f} x")
    print(f"smallest cosine to sentence-transformers: {json.dumps(quality)}")
    if args.output is not None:
        report = {"machine": facts, "texts": len(texts), "tokens": num_tokens, "seconds": seconds, "cosine": quality}
        save(args.output, "embeddings", report=report)


if __name__ == "__main__":
    main()
