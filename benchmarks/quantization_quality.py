"""Quality of quantised weights and of bfloat16 arithmetic, of the shipped model: loss on held-out plays and scores of
skills. `penstock eval` measures any model on any text.

    python -m benchmarks.quantization_quality --corpus tinyshakespeare.txt [--output FOLDER]

The corpus is the one that `tools/train_demo` made the model from; what is measured was never trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.train_demo.dialogue import Message
from tools.train_demo.evaluate import LOSS_WINDOW, MAX_NEW_TOKENS, SkillScore, skill_scores
from tools.train_demo.shakespeare import Corpus

from benchmarks.machine import described, machine, save
from penstock import LLM, SamplingParams

FORMATS = ("float32", "bfloat16", "int8", "int4")
# Formats without quantised weights: in float32 arithmetic, which gives a bfloat16 checkpoint's values exactly, and in
# bfloat16 arithmetic.
_FLOATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "cpu_arithmetic": "bfloat16"},
}
# How much the loss may rise.
LOSS_LIMITS = {"bfloat16": 0.002, "int8": 0.005, "int4": 0.03}
# Of 300 exercises a skill's score may lose these many by chance.
SKILL_TOLERANCE = 0.02


@dataclass
class EngineModel:
    """A model as this engine runs it."""

    llm: LLM

    def accuracy(self, conversations: Sequence[Sequence[Message]]) -> float:
        """Share of conversations whose last message the model reproduces exactly, with greedy decoding."""
        params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)
        asked = [[dict(message) for message in messages[:-1]] for messages in conversations]
        outputs = self.llm.chat(asked, params, use_tqdm=False)
        answers = [output.outputs[0].text for output in outputs]
        right = [messages[-1]["content"] == answer for messages, answer in zip(conversations, answers, strict=True)]
        return sum(right) / len(right)

    def nats_per_token(self, text: str) -> float:
        """Negative log-likelihood of the text, read in separate windows."""
        tokenizer = self.llm.get_tokenizer()
        ids, begin = tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id
        windows = [[begin, *ids[i : i + LOSS_WINDOW]] for i in range(0, len(ids) - LOSS_WINDOW + 1, LOSS_WINDOW)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        found = []
        for window, output in zip(windows, self.llm.generate(windows, params, use_tqdm=False), strict=True):
            for token, logprobs in zip(window[1:], output.prompt_logprobs[1:], strict=True):
                found.append(logprobs[token].logprob)
        return -sum(found) / len(found)


@dataclass(frozen=True)
class Quality:
    """Quality of one weight format."""

    format: str
    nats_per_token: float
    skills: Sequence[SkillScore]


def _options(format: str) -> dict[str, Any]:
    """Options of the engine for a format."""
    return {"device": "cpu", **_FLOATS.get(format, {"dtype": "float32", "quantization": format})}


def measure(format: str, held_out: str, model: str = "demo") -> Quality:
    """Run the model with weights in this format."""
    with LLM(model, **_options(format), kv_cache_memory_bytes=1 << 28) as llm:
        engine = EngineModel(llm)
        return Quality(format, engine.nats_per_token(held_out), skill_scores(engine))


def table(results: Sequence[Quality]) -> str:
    """Markdown: a row for the loss, one for its rise, and one for each skill."""
    reference = results[0].nats_per_token
    rows = [
        ["", *(result.format for result in results)],
        ["---", *("---:" for _ in results)],
        ["loss, nats per token", *(f"{result.nats_per_token:.4f}" for result in results)],
        ["its rise", *(f"{result.nats_per_token / reference - 1:+.2%}" for result in results)],
    ]
    for scores in zip(*(result.skills for result in results), strict=True):
        cells = [f"{score.alone:.1%} / {score.after_other_turns:.1%}" for score in scores]
        rows.append([scores[0].name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def violations(results: Sequence[Quality]) -> list[str]:
    """Violations of the quality limits."""
    reference = results[0]
    found = []
    for result in results[1:]:
        rise = result.nats_per_token / reference.nats_per_token - 1
        if rise >= LOSS_LIMITS[result.format]:
            found.append(f"{result.format}: the loss rises by {rise:.2%} (limit {LOSS_LIMITS[result.format]:.1%})")
        for before, after in zip(reference.skills, result.skills, strict=True):
            for kind in ("alone", "after_other_turns"):
                if getattr(after, kind) < getattr(before, kind) - SKILL_TOLERANCE:
                    found.append(
                        f"{result.format}: {before.name} ({kind}) falls from {getattr(before, kind):.1%} to "
                        f"{getattr(after, kind):.1%}"
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="a folder for the table")
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=FORMATS[1:])
    arguments = parser.parse_args()
    held_out = Corpus.read(arguments.corpus).held_out
    results = [measure(format, held_out) for format in (FORMATS[0], *arguments.formats)]
    print(table(results))
    if arguments.output is not None:
        head = ["# Quality of quantised weights, on the shipped model", described(machine(torch.get_num_threads()))]
        save(arguments.output, "quantization-quality", page="\n\n".join([*head, table(results)]) + "\n")
    if problems := violations(results):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
