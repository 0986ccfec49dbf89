"""Embeddings per second, beside sentence-transformers and vLLM on the same machine and weights.

    python -m benchmarks.embeddings [--texts 300] [--shortest 16] [--longest 512] [--layers 12] [--hidden 768]
        [--engines sentence-transformers,float32,int8] [--dtype float32] [--part 1/1] [--pieces 3] [--threads N]
        [--vllm PYTHON] [--keep FOLDER] [--output FOLDER]
    python -m benchmarks.embeddings --short 2000 [--pieces 3]

A random encoder of BERT-base's shape embeds texts of lengths spread evenly between the shortest and the longest.
They are dealt into parts, of which one run measures one, and within a run into pieces, for each of which the engines
take turns; so a ratio is of neighbouring seconds. All have the same number of threads.

Engines: sentence-transformers, float32, int8 (weights), bfloat16 (weights), default (Penstock without options), vllm
and vllm-float32, with the Python of an environment that has it. --dtype: of the checkpoint, which "default", vllm and
sentence-transformers follow. --keep: folder of the model, which is written there unless it is there already.

--short embeds short texts instead, with tokenisation beside the steps, and before them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import described, machine, save
from penstock import LLM, PoolingParams

# Penstock's engines: options by name.
_OURS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "default": {},
}
_SENTENCE_TRANSFORMERS = "sentence-transformers"
# vLLM's dtype, by the names of its engines.
_VLLM = {"vllm": "auto", "vllm-float32": "float32"}
_VOCAB_SIZE = 30_522
_NUM_SPECIAL = 2


def make_model(folder: Path, num_layers: int, hidden_size: int, dtype: str = "float32") -> None:
    """Write a random BERT with mean pooling, as sentence-transformers keeps it. dtype: of its weights."""
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
    BertModel(config).eval().to(getattr(torch, dtype)).save_pretrained(folder / "base")
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


# Embeds texts: unit vectors.
Embed = Callable[[Sequence[str]], Any]


@contextmanager
def penstock(model: Path, threads: int, name: str) -> Iterator[Embed]:
    with LLM(model, num_threads=threads, **_OURS[name]) as llm:
        yield lambda texts: [one.outputs.embedding for one in llm.embed(list(texts), use_tqdm=False)]


@contextmanager
def sentence_transformers(model: Path) -> Iterator[Embed]:
    from sentence_transformers import SentenceTransformer

    oracle = SentenceTransformer(str(model), device="cpu")
    yield lambda texts: oracle.encode(list(texts), batch_size=32, convert_to_numpy=True).astype(np.float32)


@contextmanager
def vllm(python: str, model: Path, threads: int, dtype: str) -> Iterator[Embed]:
    """vLLM in a process of its own environment, which takes texts and returns vectors as lines of JSON."""
    variables = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    driver = Path(__file__).parent / "peers" / "drivers" / "vllm_embeddings.py"
    process = subprocess.Popen(
        [python, str(driver), str(model), dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def embed(texts: Sequence[str]) -> Any:
        stdin.write(json.dumps(list(texts)) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("[["):
                return json.loads(line)
        raise RuntimeError(f"vLLM ended with {process.wait()}")

    try:
        yield embed
    finally:
        stdin.close()
        process.wait()


def measure(engines: dict[str, Embed], pieces: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Seconds of each piece, by engine; the engines take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number, piece in enumerate(pieces):
        names = list(engines)
        # No engine always comes first.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            engines[name](piece)
            seconds[name].append(time.perf_counter() - start)
        taken = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
        print(f"piece {number + 1} of {len(pieces)}, {len(piece)} texts: {taken}", flush=True)
    return seconds


def report(seconds: dict[str, list[float]], num_texts: int, num_tokens: int) -> None:
    first = next(iter(seconds))
    for name, taken in seconds.items():
        ratios = [one / other for one, other in zip(seconds[first], taken, strict=True)]
        speed = f"{num_texts / sum(taken):7.1f} texts/s  {num_tokens / sum(taken):9,.0f} tokens/s"
        spread = f"{sum(seconds[first]) / sum(taken):5.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:22} {sum(taken):7.2f} s  {speed}  {spread}")


def cosine(found: Sequence[Any], expected: np.ndarray) -> float:
    """Smallest cosine between two lists of vectors."""
    x, y = np.array(found), np.array(expected)
    return float(((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).min())


def measure_short(model: Path, count: int, repeats: int, threads: int) -> None:
    """Print the time of many short texts, tokenised beside the steps and before them, and the time before a step."""
    draw = random.Random(1)
    texts = [
        " ".join(f"w{draw.randrange(10, _VOCAB_SIZE)}" for _ in range(draw.randrange(4, 12))) for _ in range(count)
    ]
    seconds: dict[str, list[float]] = {"tokenised before": [], "tokenised beside": [], "tokenising": []}
    waits: dict[str, list[float]] = {"tokenised before": [], "tokenised beside": []}
    with LLM(model, num_threads=threads, dtype="float32") as llm:
        session, step = llm._session, llm._session._dispatcher.step
        first_step: list[float] = []

        def noted_step() -> None:
            first_step.append(time.perf_counter())
            step()

        session._dispatcher.step = noted_step  # type: ignore[method-assign]
        params = PoolingParams(task="embed")
        llm.embed(texts[:64], use_tqdm=False)
        for _ in range(repeats):
            for name in waits:
                first_step.clear()
                start = time.perf_counter()
                if name == "tokenised beside":
                    llm.embed(texts, use_tqdm=False)
                else:
                    requests = [session.accept(text, params) for text in texts]
                    seconds["tokenising"].append(time.perf_counter() - start)
                    with closing(session.run(requests)) as steps:
                        _ = [progress.output().pooled for progress in steps if progress.finished]
                seconds[name].append(time.perf_counter() - start)
                waits[name].append(first_step[0] - start)
    for name, taken in seconds.items():
        wait = f"  first step after {1000 * statistics.median(waits[name]):.1f} ms" if name in waits else ""
        print(f"{name:18} {statistics.median(taken):7.3f} s ({min(taken):.3f} to {max(taken):.3f}){wait}")
    ratios = [one / other for one, other in zip(seconds["tokenised before"], seconds["tokenised beside"], strict=True)]
    print(f"before / beside: {statistics.median(ratios):.3f} x ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("texts", 300), ("shortest", 16), ("longest", 512), ("layers", 12), ("hidden", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engines", default=f"{_SENTENCE_TRANSFORMERS},float32,int8")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--pieces", type=int, default=3)
    parser.add_argument("--short", type=int)
    parser.add_argument("--vllm")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = args.keep or Path(temporary)
        model = folder / "model"
        if not model.exists():
            make_model(folder, args.layers, args.hidden, args.dtype)
        print(described(machine(args.threads)))
        if args.short is not None:
            measure_short(model, args.short, args.pieces, args.threads)
            return
        part, parts = map(int, args.part.split("/"))
        texts = make_texts(args.texts, args.shortest, args.longest)[part - 1 :: parts]
        engines: dict[str, Embed] = {}
        for name in args.engines.split(","):
            if name == _SENTENCE_TRANSFORMERS:
                context = sentence_transformers(model)
            elif name in _VLLM:
                context = vllm(args.vllm, model, args.threads, _VLLM[name])
            else:
                context = penstock(model, args.threads, name)
            engines[name] = stack.enter_context(context)
        few = sorted(texts, key=len)[:3]
        vectors = {name: embed(few) for name, embed in engines.items()}
        expected = next(iter(vectors.values()))
        quality = {name: cosine(found, expected) for name, found in vectors.items()}
        seconds = measure(engines, [texts[number :: args.pieces] for number in range(args.pieces)])
    num_tokens = sum(len(text.split()) + _NUM_SPECIAL for text in texts)
    print(f"{len(texts)} texts, {num_tokens:,} tokens, {args.layers} layers of {args.hidden}, {args.dtype} checkpoint")
    report(seconds, len(texts), num_tokens)
    print(f"smallest cosine to the first: {json.dumps(quality)}")
    if args.output is not None:
        facts = {"texts": len(texts), "tokens": num_tokens, "seconds": seconds, "cosine": quality, "part": args.part}
        save(args.output, "embeddings", report={"machine": machine(args.threads), **facts})


if __name__ == "__main__":
    main()
