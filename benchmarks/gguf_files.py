"""Penstock beside llama.cpp on the same GGUF files: speed in turns, loss on texts, token ids and greedy outputs.

    python -m benchmarks.peers setup --work-dir FOLDER --engines llama.cpp-f32                     its environment
    python -m benchmarks.gguf_files speed FILE.gguf --work-dir FOLDER [--workloads decode prefill] [--repeats 3]
    python -m benchmarks.gguf_files loss FILE.gguf ... --work-dir FOLDER --texts FILE ... [--reference FILE.gguf]
    python -m benchmarks.gguf_files tokens FILE.gguf --work-dir FOLDER
    python -m benchmarks.gguf_files requantize FILE.gguf OUTPUT.gguf Q8_0|Q4_K_M --work-dir FOLDER       by llama.cpp

Each engine has a process of its own, and only one is awake at a time. A ratio is of the two times of one turn; the
table has the median and the range. Prompts are token ids, greedy, with fixed output lengths.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine
from benchmarks.peers.catalogue import EngineSpec
from benchmarks.peers.environments import python_of, repository
from benchmarks.peers.process import EngineProcess
from benchmarks.workloads import make_workloads

OURS = EngineSpec("penstock-gguf", "Penstock", "penstock", None, "gguf", 0)
THEIRS = EngineSpec("llama.cpp-gguf", "llama.cpp", "llama_cpp_batches", "llama-cpp", "gguf", 0)
# As a file loads without options, and with its values in float32 arithmetic: the reference of losses.
EXACT = EngineSpec(
    "penstock-float32", "Penstock float32", "penstock", None, "gguf", 32, {"quantization": "none", "dtype": "float32"}
)
# Aims of the ratio of speeds by workload.
AIMS = {"decode": 1.2, "prefill": 1.5, "throughput": 3.0}
_KV_TOKENS, _KV_BYTES = 16_384, 1 << 30
_WINDOW = 256
_WARM_UP_TOKENS = 4
_GREEDY_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "In 1984, 12345 people",
    "def fib(n):\n",
    "Der Hund läuft über die Straße. 你好",
    "1, 2, 3, 4,",
    "Once upon a time, there was a little girl who",
)
ODD_TEXTS = (
    *PROMPTS,
    "",
    " ",
    "  leading and trailing  ",
    "\t tab\tand\r\nlines\n\n\n   indented\n",
    "it's we'll I'M DON'T they've 'quoted'",
    "12345 3.14159 1,000,000 ٣٤٥ ½ x² 2⁸",
    "naïve café Straße Ελληνικά русский العربية עברית हिन्दी ไทย 日本語 한국어 你好",
    "e\u0301 \u00e9 \u200b zero\u200bwidth \u00a0nbsp \ufeff bom \u2028 line",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 🏴‍☠️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_star",
    "a_b-c.d/e\\f@g#h$i%j^k&l*m(n)o[p]q{r}s|t~u`v",
    "https://example.org/?q=a%20b&c=[1,2,3]#d",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); }',
    "\x00\x01\x7f control",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===+++",
    "Ⅷ ⅷ ㊗ ﬁ ﬀ ª º ʰ ˀ ｆｕｌｌ　ｗｉｄｔｈ",
)


@contextmanager
def engine(spec: EngineSpec, model: Path, arguments: argparse.Namespace) -> Iterator[EngineProcess]:
    """Process of an engine that has loaded a file; ended afterwards."""
    process = EngineProcess(
        spec,
        model.absolute(),
        arguments.work_dir,
        threads=arguments.threads,
        num_kv_tokens=_KV_TOKENS,
        num_kv_bytes=_KV_BYTES,
    )
    try:
        yield process
    finally:
        process.close()


def speed(arguments: argparse.Namespace) -> str:
    """Markdown table of both engines' speeds, and their ratio."""
    rows = ["| workload | Penstock | llama.cpp | ratio | range | aim |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    with engine(OURS, arguments.model, arguments) as ours, engine(THEIRS, arguments.model, arguments) as theirs:
        processes = (ours, theirs)
        for process in processes:
            process.pause()
        for name in arguments.workloads:
            turns = []
            for turn in range(arguments.repeats):
                turns.append([_rate(process, name, turn) for process in processes])
                print(f"{name}: {turns[-1][0]:.1f} and {turns[-1][1]:.1f} per second", file=sys.stderr, flush=True)
            rates = [statistics.median(turn[index] for turn in turns) for index in range(2)]
            ratios = [turn[0] / turn[1] for turn in turns]
            unit = next(workload.unit for workload in make_workloads() if workload.name == name)
            rows.append(
                f"| {name} | {rates[0]:.1f} {unit} | {rates[1]:.1f} | {statistics.median(ratios):.2f} | "
                f"{min(ratios):.2f} to {max(ratios):.2f} | {AIMS.get(name, 1):.1f} |"
            )
    return "\n".join(rows)


def _rate(process: EngineProcess, name: str, turn: int) -> float:
    """Units per second of a workload; the first call of a process warms it up."""
    workload = next(one for one in make_workloads(draw=1 + turn) if one.name == name)
    process.resume()
    if name not in process.warm:
        process.warm.add(name)
        cold = next(one for one in make_workloads(draw=1_000) if one.name == name)
        process.run(cold.prompts[:4], [min(count, _WARM_UP_TOKENS) for count in cold.num_outputs[:4]])
    reply = process.run(workload.prompts, workload.num_outputs)
    process.pause()
    return workload.num_units / float(reply["seconds"])


def loss(arguments: argparse.Namespace) -> str:
    """Markdown table of the loss of each file in both engines, beside the reference in float32."""
    texts = [path.read_text() for path in arguments.texts]
    with engine(EXACT, arguments.reference or arguments.models[0], arguments) as process:
        tokens = [ids[: arguments.max_tokens // len(texts)] for ids in process.call("tokenize", texts)]
        windows = [ids[i : i + _WINDOW] for ids in tokens for i in range(0, len(ids) - _WINDOW + 1, _WINDOW)]
        reference = process.call("logprobs", windows)
    loss_of = -statistics.fmean(reference)
    rows = [
        f"{len(reference)} tokens in windows of {_WINDOW}.\n",
        "| file | engine | loss | its rise | mean change |",
        "| --- | --- | ---: | ---: | ---: |",
        f"| {(arguments.reference or arguments.models[0]).name} | Penstock float32 | {loss_of:.4f} | | |",
    ]
    for model in arguments.models:
        for spec in (OURS, THEIRS):
            with engine(spec, model, arguments) as process:
                found = process.call("logprobs", windows)
            change = statistics.fmean(abs(one - other) for one, other in zip(found, reference, strict=True))
            value = -statistics.fmean(found)
            rows.append(f"| {model.name} | {spec.title} | {value:.4f} | {value / loss_of - 1:+.2%} | {change:.4f} |")
    return "\n".join(rows)


def tokens(arguments: argparse.Namespace) -> str:
    """Lines that name the texts with other token ids, and the prompts with other greedy outputs."""
    found: list[list[list[int]]] = []
    outputs: list[list[list[int]]] = []
    for spec in (OURS, THEIRS):
        with engine(spec, arguments.model, arguments) as process:
            ids = process.call("tokenize", ODD_TEXTS)
            found.append(ids)
            outputs.append(process.call("generate", ids[: len(PROMPTS)], [_GREEDY_TOKENS] * len(PROMPTS)))
    same = [ours == theirs for ours, theirs in zip(*found, strict=True)]
    lines = [f"{sum(same)} of {len(same)} texts have the same token ids."]
    for text, ours, theirs in zip(ODD_TEXTS, *found, strict=True):
        if ours != theirs:
            lines.append(f"- {text!r}: {ours} in Penstock, {theirs} in llama.cpp")
    lengths = [_common(ours, theirs) for ours, theirs in zip(*outputs, strict=True)]
    lines.append(f"Greedy tokens in common, of {_GREEDY_TOKENS}: {', '.join(map(str, lengths))}.")
    return "\n".join(lines)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def requantize(arguments: argparse.Namespace) -> str:
    """Write a file in another quantisation with llama.cpp."""
    command = [str(python_of(arguments.work_dir, "llama-cpp")), "-m", "benchmarks.peers.convert.requantized_gguf"]
    files = [str(arguments.model.absolute()), str(arguments.output.absolute()), arguments.type]
    subprocess.run([*command, *files], cwd=repository(), check=True)
    return f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.1f} MB"


def main() -> None:
    arguments = _parse()
    # As Ctrl-C does: an engine that is stopped while the other runs would else be left behind.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    arguments.work_dir = arguments.work_dir.resolve()
    commands: dict[str, Any] = {"speed": speed, "loss": loss, "tokens": tokens, "requantize": requantize}
    print(f"{described(machine(arguments.threads))}\n\n{commands[arguments.command](arguments)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("speed", "tokens", "requantize"):
        commands.add_parser(name).add_argument("model", type=Path)
    by_name = commands.choices
    by_name["speed"].add_argument("--workloads", nargs="+", choices=list(AIMS), default=list(AIMS))
    by_name["speed"].add_argument("--repeats", type=int, default=3)
    by_name["requantize"].add_argument("output", type=Path)
    by_name["requantize"].add_argument("type", choices=["Q8_0", "Q4_K_M"])
    losses = commands.add_parser("loss")
    losses.add_argument("models", type=Path, nargs="+")
    losses.add_argument("--texts", type=Path, nargs="+", required=True)
    losses.add_argument("--reference", type=Path, help="the file in float32; by default the first one")
    losses.add_argument("--max-tokens", type=int, default=4600, help="of all texts")
    for one in by_name.values():
        one.add_argument("--work-dir", type=Path, required=True, help="with llama.cpp's environment")
        one.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
