"""Cost of structured outputs relative to a step of the 60M Llama: bitmasks, matchers, and applying the masks.

    python -m benchmarks.structured [--requests 32] [--steps 100] [--turns 5] [--threads 2]
        [--output FOLDER]

Requests that are constrained and requests that are not, with the same prompts and drawn at temperature 1, take turns in
one engine. The tokens are those of a vocabulary of 32,000 that is learned from Python's own library first, so that they
have the punctuation of JSON in them. All outputs are JSON that goes on for as long as the run does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.host_time import PartClock, parts_of
from benchmarks.machine import described, machine, save
from benchmarks.peers.checkpoints import make
from benchmarks.peers.shapes import SHAPES
from penstock.config import EngineConfig
from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.engine.session import Session
from penstock.features.structured_output.bitmask import Bitmask
from penstock.structured.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher

_VOCAB_SIZE = 32_000
# Prefills, and a few steps for caches to settle.
_SKIPPED_STEPS = 10
_WHOLE = "whole step"
_ON_THE_HOST = "bitmasks and matchers"
_PARTS = (_ON_THE_HOST, "applying the masks")
_SHARES = (
    "share of bitmasks and matchers",
    "share with applying the masks",
    "step relative to one without constraints",
)
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mail": {"type": "string", "format": "email"},
        "kind": {"enum": ["reader", "writer", "editor"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 4},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "mail", "kind", "tags", "score"],
    "additionalProperties": False,
}
_NODE = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "text": {"type": "string", "maxLength": 40},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["id", "text", "children"],
}
SCHEMAS = {
    "people": {"type": "array", "items": _PERSON, "minItems": 1000},
    "trees": {"type": "array", "items": {"$ref": "#/$defs/node"}, "$defs": {"node": _NODE}, "minItems": 1000},
    "texts": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "anything": {"type": "array", "items": {}, "minItems": 1000},
}


def learn_tokenizer(folder: Path) -> None:
    """Overwrite a checkpoint's tokenizer with one of as many tokens as a text has words and punctuation."""
    import os

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(Path(os.__file__).parent.glob("*.py")) + sorted(Path(os.__file__).parent.glob("[a-z]*/*.py"))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.read_text(errors="ignore") for file in files if "site-packages" not in file.parts)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < _VOCAB_SIZE:
        raise SystemExit(f"Python's library is too small: it gave {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(folder / "tokenizer.json"))


def run(session: Session, requests: list[SamplingParams], steps: int) -> list[dict[str, float]]:
    """Seconds of each part, step by step, once all requests decode."""
    clock = PartClock()
    core, runner = parts_of(session)
    clock.wrap(core.scheduler, "sampling_input", _ON_THE_HOST)
    (bitmask,) = (one for one in runner.sampler.shaping if isinstance(one, Bitmask))
    clock.wrap(bitmask, "begin_step", "applying the masks")
    clock.wrap(bitmask, "apply", "applying the masks")
    clock.wrap(session, "_turn", _WHOLE, ends_step=True)
    accepted = [session.accept(f"def function_{index}():", params) for index, params in enumerate(requests)]
    with closing(session.run(accepted)) as progress:
        for _ in progress:
            if len(clock.steps) >= steps + _SKIPPED_STEPS:
                break
    clock.unwrap()
    if len(clock.steps) < steps + _SKIPPED_STEPS:
        raise SystemExit(f"The outputs ended after {len(clock.steps)} steps")
    return clock.steps[_SKIPPED_STEPS:]


@contextmanager
def timed_masks(times: list[float]) -> Iterator[None]:
    """Note how long each request's mask takes."""
    original: Callable[..., None] = LLGuidanceMatcher.fill

    def fill(matcher: LLGuidanceMatcher, words: Any) -> None:
        begin = time.perf_counter()
        original(matcher, words)
        times.append(time.perf_counter() - begin)

    LLGuidanceMatcher.fill = fill  # type: ignore[method-assign]
    try:
        yield
    finally:
        LLGuidanceMatcher.fill = original  # type: ignore[method-assign]


def measure(session: Session, num_requests: int, steps: int, turns: int) -> dict[str, Any]:
    constraints = [StructuredOutputsParams(json=schema) for schema in SCHEMAS.values()]
    plain = [SamplingParams(max_tokens=1000, ignore_eos=True, seed=index) for index in range(num_requests)]
    constrained = [
        SamplingParams(max_tokens=1000, seed=index, structured_outputs=constraints[index % len(constraints)])
        for index in range(num_requests)
    ]
    mask_times: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in _SHARES}
    medians = []
    for _ in range(turns):
        without = statistics.median(step[_WHOLE] for step in run(session, plain, steps))
        with timed_masks(mask_times):
            found = run(session, constrained, steps)
        whole = statistics.median(step[_WHOLE] for step in found)
        parts = {part: statistics.median(step.get(part, 0.0) for step in found) for part in _PARTS}
        values = (parts[_ON_THE_HOST] / whole, sum(parts.values()) / whole, whole / without)
        for name, value in zip(_SHARES, values, strict=True):
            shares[name].append(value)
        medians.append({"without": without, _WHOLE: whole, **parts})
    cuts = statistics.quantiles(mask_times, n=100)
    return {
        **shares,
        "milliseconds": {name: [1e3 * turn[name] for turn in medians] for name in medians[0]},
        "microseconds per mask": {"p50": 1e6 * cuts[49], "p99": 1e6 * cuts[98]},
    }


def compile_times(folder: Path, repeats: int = 7) -> dict[str, float]:
    """Milliseconds that a backend takes, the median of a few."""
    backend = LLGuidanceBackend((folder / "tokenizer.json").read_text(), _VOCAB_SIZE, [2])
    result = {}
    for name, schema in SCHEMAS.items():
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            backend.compile(StructuredOutputsParams(json=schema))
            times.append(time.perf_counter() - begin)
        result[name] = 1e3 * statistics.median(times)
    return result


def as_markdown(report: dict[str, Any]) -> str:
    lines = ["# Structured outputs relative to a step of the 60M Llama", "", described(report["machine"]), ""]
    lines += ["| median of turns | | least to most |", "| --- | ---: | --- |"]
    for name in _SHARES:
        values = report[name]
        lines.append(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} to {max(values):.3f} |")
    for name, values in report["milliseconds"].items():
        lines.append(f"| {name}, ms | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")
    mask = report["microseconds per mask"]
    lines += ["", f"A request's mask: p50 {mask['p50']:.0f}, p99 {mask['p99']:.0f} microseconds."]
    compiled = ", ".join(f"{name} {value:.1f}" for name, value in report["milliseconds to compile"].items())
    return "\n".join([*lines, "", f"Milliseconds to compile: {compiled}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work_dir:
        folder = make(Path(work_dir), SHAPES["llama-60m"], "float32")
        learn_tokenizer(folder)
        config = EngineConfig.create(
            folder,
            num_threads=arguments.threads,
            max_num_seqs=arguments.requests,
            device="cpu",
        )
        session = Session(config)
        report = measure(session, arguments.requests, arguments.steps, arguments.turns)
        session.close()
        report["milliseconds to compile"] = compile_times(folder)
    report["machine"] = machine(arguments.threads)
    print(as_markdown(report))
    if arguments.output is not None:
        save(arguments.output, "structured", report=report, page=as_markdown(report))


if __name__ == "__main__":
    main()
