"""Number of threads on a shared machine: the rule of `pace.h`, and answers that do not depend on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.kernels.native
from penstock import LLM, SamplingParams

_SOURCE = Path(penstock.kernels.native.__file__).parent / "csrc"
# Simulates steps of equal work: each thread above the free ones makes the others wait for `away` seconds.
_PROGRAM = """
#include "pace.h"
#include <cstdio>
int main() {
  penstock::Pace pace;
  double now = 1000, work, away, until;
  int full, free;
  while (std::scanf("%d %d %lf %lf %lf", &full, &free, &work, &away, &until) == 5) {
    const double begin = now, end = now + until;
    int steps = 0, lossy = 0, threads = 0;
    while (now < end) {
      threads = pace.threads(full, now);
      const double lost = threads > free ? away : 0, time = work / threads + lost;
      now += time;
      pace.note(full, threads, time, lost, now);
      ++steps;
      lossy += lost > 0;
    }
    std::printf("%d %d %d %f\\n", threads, steps, lossy, now - begin);
  }
}
"""


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("pace")
    (folder / "simulate.cpp").write_text(_PROGRAM)
    command = [compiler, "-std=c++17", "-O1", f"-I{_SOURCE}", "simulate.cpp", "-o", "simulate"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "simulate"


def simulate(simulator: Path, *phases: tuple[int, int, float, float, float]) -> list[tuple[int, int, int]]:
    """Run phases of (all threads, free cores, work, time away, duration), in seconds.

    Returns for each the last number of threads, the number of steps, and how many of them lost time.
    """
    lines = "".join(" ".join(map(str, phase)) + "\n" for phase in phases)
    done = subprocess.run([simulator], input=lines, capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split()[:3])) for line in done.stdout.splitlines()]  # type: ignore[misc]


@settings(deadline=None, max_examples=40)
@given(full=st.integers(2, 16), busy=st.integers(1, 16), work=st.floats(1e-4, 5e-2), away=st.floats(2e-3, 3e-2))
def test_threads_follow_the_free_cores(simulator: Path, full: int, busy: int, work: float, away: float) -> None:
    free = max(1, full - busy)
    # A shorter absence is not worth a thread.
    away = max(away, work)
    shared, alone = simulate(simulator, (full, free, work, away, 20.0), (full, full, work, away, 30.0))
    assert shared[0] in (free, free + 1)
    # Tries are rare.
    assert shared[2] * away < 4.0 + away * full
    assert alone[0] == full


def test_a_quiet_machine_keeps_all_threads(simulator: Path) -> None:
    (quiet,) = simulate(simulator, (8, 8, 1e-3, 0.0, 5.0))
    assert quiet == (8, quiet[1], 0)


@pytest.fixture
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_answers_are_the_same_on_a_shared_machine(request: pytest.FixtureRequest) -> None:
    prompts = ["ROMEO:", "First Citizen:\nWe are", "The king"]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True)
    with LLM("demo", device="cpu", num_threads=2, kv_cache_memory_bytes=1 << 24) as llm:
        alone = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        request.getfixturevalue("busy_loops")
        shared = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert [(one.token_ids, one.logprobs) for one in shared] == [(one.token_ids, one.logprobs) for one in alone]
