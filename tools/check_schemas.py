"""Compare the enforcement of JSON schemas with their instances, over files of schemas.

    python tools/check_schemas.py FILE.jsonl.gz [...] [--outputs N] [--show]

Each line of a file has a "schema", a "name" (or "file" and "description"), and "tests": instances ("data") that are
"valid" or not. Every instance goes through the matcher token by token. No invalid one may pass; a valid one that does
not is counted apart, with those that pass with their properties in another order. With --outputs, as many outputs per
schema are drawn at random, token by token, and validated with jsonschema. Instances are compared with open objects and
without default bounds, outputs are drawn with them as requests have them by default. With --sample, as many of the
schemas whose names begin with one of --sources are chosen by a --seed. With --generate, the demo model answers each
schema that is accepted, at temperature 1 and up to its context; its outputs are counted by how they end.

Exits with 1 where something was accepted wrongly.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from penstock import LLM
from penstock.config import ModelConfig
from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.backend import Matcher, MatcherError
from penstock.structured.final_check import exact_json
from penstock.structured.llguidance_backend import LLGuidanceBackend
from penstock.structured.schema_check import NotEnforced
from penstock.text.tokenizer import Tokenizer, load_tokenizer

_NUM_ORDERS = 50
_MAX_TOKENS = 300
_SLOW_S = 1.0
_PROMPT = "First Citizen:"


class Check:
    """Runs schemas through a grammar backend, and counts the results."""

    def __init__(self, *, num_outputs: int, shows: bool) -> None:
        model = ModelConfig.load("demo")
        self.tokenizer: Tokenizer = load_tokenizer(model.tokenizer_folder)
        self.end = min(model.eos_token_ids)
        self.vocab_size = model.vocab_size
        self.backend = LLGuidanceBackend(self.tokenizer.as_json() or "", model.vocab_size, model.eos_token_ids)
        self.num_outputs = num_outputs
        self.shows = shows
        self.counts: Counter[str] = Counter()
        # (outcome, schema, instance or output) of everything that is not as the file says.
        self.differences: list[tuple[str, str, str]] = []
        self.accepted: list[dict[str, Any]] = []
        self.refused: Counter[str] = Counter()
        self.not_compiled: Counter[str] = Counter()
        self.mask_times: list[float] = []
        self.compile_times: list[float] = []
        self.random = random.Random(0)
        self.generator = np.random.default_rng(0)

    def add(self, case: dict[str, Any]) -> None:
        name = _name_of(case)
        self.counts["schemas"] += 1
        begin = time.perf_counter()
        try:
            whole = StructuredOutputsParams(json=case["schema"], disable_additional_properties=False)
            matcher = self.backend.compile(whole).start()
            narrow = self.backend.compile(StructuredOutputsParams(json=case["schema"])).start()
        except NotEnforced as error:
            self.counts["refused"] += 1
            self.refused.update(set(error.keywords))
            return
        except InvalidParameter as error:
            self.counts["not compiled"] += 1
            self.not_compiled[str(error).removeprefix("structured_outputs.json cannot be enforced: ")[:70]] += 1
            return
        self.compile_times.append(time.perf_counter() - begin)
        if self.compile_times[-1] > _SLOW_S:
            self._show("slow to compile", name, f"{self.compile_times[-1]:.1f} s")
        self.counts["accepted"] += 1
        self.accepted.append(case)
        for test in case["tests"]:
            self._check_instance(matcher, name, test)
        for _ in range(self.num_outputs):
            self._check_output(narrow, name, case["schema"])

    def _check_instance(self, matcher: Matcher, name: str, test: dict[str, Any]) -> None:
        passes = self._passes(matcher, test["data"])
        if test["valid"] and not passes:
            orders = (self._reordered(test["data"]) for _ in range(_NUM_ORDERS))
            in_another_order = any(self._passes(matcher, order) for order in orders)
            outcome = "valid, passes in another order" if in_another_order else "valid, does not pass"
        else:
            outcome = f"{'valid' if test['valid'] else 'invalid'}, {'passes' if passes else 'does not pass'}"
        self.counts[outcome] += 1
        if passes != test["valid"]:
            self._differs(outcome, name, json.dumps(test["data"], ensure_ascii=False))

    def _passes(self, matcher: Matcher, instance: Any) -> bool:
        text = json.dumps(instance, ensure_ascii=False)
        token_ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.end]
        num_accepted = matcher.accept(token_ids)
        matcher.rollback(num_accepted)
        return num_accepted == len(token_ids)

    def _reordered(self, instance: Any) -> Any:
        if isinstance(instance, list):
            return [self._reordered(item) for item in instance]
        if not isinstance(instance, dict):
            return instance
        names = self.random.sample(list(instance), len(instance))
        return {name: self._reordered(instance[name]) for name in names}

    def _check_output(self, matcher: Matcher, name: str, schema: Any) -> None:
        try:
            text = self._draw(matcher)
        except MatcherError as error:
            self.counts["outputs, given up"] += 1
            self._show("given up", name, str(error))
            return
        if text is None:
            self.counts["outputs, too long"] += 1
            return
        self._check_text(name, schema, text)

    def _check_text(self, name: str, schema: Any, text: str) -> None:
        errors = _errors(schema, text)
        self.counts["outputs, invalid" if errors else "outputs, valid"] += 1
        if errors:
            self._differs("invalid output", name, f"{errors}: {text}")

    def generate(self, seed: int) -> None:
        """Let the demo model answer each accepted schema."""
        params = [
            SamplingParams(
                max_tokens=None, seed=seed + number, structured_outputs=StructuredOutputsParams(json=case["schema"])
            )
            for number, case in enumerate(self.accepted)
        ]
        with LLM("demo") as llm:
            outputs = llm.generate([_PROMPT] * len(params), params)
        for case, output in zip(self.accepted, outputs, strict=True):
            reason = output.outputs[0].finish_reason
            self.counts[f"generated, {reason}"] += 1
            if reason == "stop":
                self._check_text(_name_of(case), case["schema"], output.outputs[0].text)
            else:
                self._show(f"ends by {reason}", _name_of(case), output.error or output.outputs[0].text[-200:])

    def _draw(self, matcher: Matcher) -> str | None:
        """Draw a random allowed text, which prefers closing tokens once it is long."""
        closing = {self.tokenizer.encode(character, add_special_tokens=False)[0] for character in '}]"0,'}
        words = np.zeros((self.vocab_size + 31) // 32, np.int32)
        token_ids: list[int] = []
        text: str | None = None
        while len(token_ids) < _MAX_TOKENS:
            begin = time.perf_counter()
            matcher.fill(words)
            self.mask_times.append(time.perf_counter() - begin)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            may_end = self.end in allowed
            if may_end and (len(allowed) == 1 or self.generator.random() < 0.5):
                text = self.tokenizer.decode(token_ids)
                break
            liked = [token for token in allowed if token in closing]
            prefers = liked and self.generator.random() < (0.2 if len(token_ids) < _MAX_TOKENS // 3 else 0.9)
            choose_from = liked if prefers else [token for token in allowed if token != self.end]
            token_ids.append(int(self.generator.choice(choose_from)))
            assert matcher.accept(token_ids[-1:]) == 1
        matcher.rollback(len(token_ids))
        return text

    def _differs(self, outcome: str, name: str, text: str) -> None:
        self.differences.append((outcome, name, text))
        self._show(outcome, name, text)

    def _show(self, what: str, name: str, details: str) -> None:
        if self.shows:
            print(f"{what}: {name}: {details[:300]}", file=sys.stderr)

    def report(self) -> None:
        for title, counts in (("", self.counts), ("refused by", self.refused), ("not compiled", self.not_compiled)):
            if counts:
                print(
                    f"\n{title}" if title else "",
                    *(f"{number:7} {name}" for name, number in counts.most_common()),
                    sep="\n",
                )
        for title, times, unit in (("compile", self.compile_times, 1e3), ("bitmask", self.mask_times, 1e6)):
            if times:
                p50, p99 = np.percentile(times, [50, 99]) * unit
                print(f"\n{title}: p50 {p50:.1f}, p99 {p99:.1f} {'ms' if unit == 1e3 else 'microseconds'}")

    @property
    def num_wrong(self) -> int:
        return self.counts["invalid, passes"] + self.counts["outputs, invalid"]


def _errors(schema: Any, text: str) -> list[str]:
    """Errors of a text by jsonschema alone, which compares numbers as decimals."""
    try:
        instance = exact_json(text)
    except ValueError:
        return ["it is no JSON"]
    given = exact_json(json.dumps(schema))
    validator = jsonschema.validators.validator_for(given, default=jsonschema.Draft202012Validator)
    return [error.message for error in validator(given).iter_errors(instance)]


def _name_of(case: dict[str, Any]) -> str:
    return case.get("name") or f"{case['file']}: {case['description']}"


def read(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--outputs", type=int, default=0, help="outputs to draw per schema")
    parser.add_argument("--show", action="store_true", help="name the schemas behind the numbers")
    parser.add_argument("--sample", type=int, help="schemas to choose; all without it")
    parser.add_argument("--seed", type=int, default=0, help="of the choice, and of the demo model's outputs")
    parser.add_argument("--sources", nargs="+", default=[""], help="begins of the names of schemas to choose from")
    parser.add_argument("--generate", action="store_true", help="count how outputs of the demo model end")
    options = parser.parse_args()
    check = Check(num_outputs=options.outputs, shows=options.show)
    cases = [case for case in read(options.files) if _name_of(case).startswith(tuple(options.sources))]
    if options.sample is not None:
        cases = random.Random(options.seed).sample(cases, options.sample)
    for case in cases:
        check.add(case)
    if options.generate:
        check.generate(options.seed)
    check.report()
    return 1 if check.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
