"""Second turn of a long chat with a recurrent or hybrid model, and states in bfloat16.

    python -m benchmarks.chat_turns [--shape lfm2-350m] [--tokens 4000] [--repeats 3] [--threads 2] [--work-dir FOLDER]

A model has random weights in bfloat16. After a prompt and an answer, the second turn has both, and 32 tokens of
a question. Its time to the first token is measured with snapshots of states and without, in turns; every repeat has
other tokens. Then a prompt's log-probabilities with states in bfloat16 are compared with those of float32 states.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine
from benchmarks.peers.checkpoints import make
from benchmarks.peers.hybrids import GRANITE_350M, LFM2_350M
from penstock import LLM, SamplingParams

_SHAPES = {shape.name: shape for shape in (LFM2_350M, GRANITE_350M)}
_ANSWER, _QUESTION = 32, 32
_CACHE_BYTES = 1_500_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(_SHAPES), default=LFM2_350M.name)
    parser.add_argument("--tokens", type=int, default=4000, help="of the first turn's prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, help="where the checkpoint is made and kept; a temporary folder")
    given = parser.parse_args()
    print(described(machine(given.threads)))
    with tempfile.TemporaryDirectory() as temporary:
        shape = _SHAPES[given.shape]
        config = {**shape.config, "max_position_embeddings": 1 << 17}
        long = replace(shape, name=f"{shape.name}-long", config=config)
        folder = make(given.work_dir or Path(temporary), long, "bfloat16")

        def load(**options: Any) -> LLM:
            length = given.tokens + 2 * (_ANSWER + _QUESTION)
            options |= {"num_threads": given.threads, "max_model_len": length, "kv_cache_memory_bytes": _CACHE_BYTES}
            return LLM(str(folder), device="cpu", max_num_seqs=4, **options)

        print(first_tokens(load, shape.vocab_size, given.tokens, given.repeats))
        print(cost_of_bfloat16(load, shape.vocab_size, given.tokens // 4))


def first_tokens(load: Any, vocab_size: int, num_tokens: int, repeats: int) -> str:
    """Seconds to the second turn's first token."""
    engines = {mode: load(mamba_cache_mode=mode) for mode in ("align", "none")}
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for draw in range(repeats):
        rng = random.Random(draw)
        prompt = [rng.randrange(10, vocab_size) for _ in range(num_tokens)]
        question = [rng.randrange(10, vocab_size) for _ in range(_QUESTION)]
        for mode, llm in engines.items():
            second = [*prompt, *_generate(llm, prompt, _ANSWER), *question]
            begin = time.perf_counter()
            _generate(llm, second, 1)
            seconds[mode].append(time.perf_counter() - begin)
    for llm in engines.values():
        llm.close()
    with_s, without_s = (statistics.median(seconds[mode]) for mode in engines)
    ratios = [without / one for one, without in zip(*seconds.values(), strict=True)]
    return (
        f"second turn after {num_tokens + _ANSWER:,} tokens: {with_s * 1e3:,.0f} ms to the first token, "
        f"{without_s * 1e3:,.0f} ms without snapshots: {statistics.median(ratios):.1f} times "
        f"({min(ratios):.1f} to {max(ratios):.1f})"
    )


def cost_of_bfloat16(load: Any, vocab_size: int, num_tokens: int) -> str:
    """Change of a prompt's log-probabilities by states in bfloat16."""
    rng = random.Random(0)
    prompt = [rng.randrange(10, vocab_size) for _ in range(num_tokens)]
    found = []
    for dtype in ("float32", "bfloat16"):
        llm = load(mamba_cache_dtype=dtype)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        llm.close()
        known = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        found.append([logprobs[token].logprob for token, logprobs in known])
    changes = [abs(one - other) for one, other in zip(*found, strict=True)]
    return (
        f"states in bfloat16: log-probabilities of {len(changes):,} tokens change by {statistics.mean(changes):.1e} in "
        f"the mean, by {max(changes):.1e} at most"
    )


def _generate(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
