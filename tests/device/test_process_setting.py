"""Process-wide settings of one and of several engines."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.device.process_setting import ProcessSetting
from support.answers import patient

BEFORE = "before"


@patient
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_the_latest_that_is_left_has_it_its_way(moves: list[tuple[bool, int]]) -> None:
    values = [BEFORE]
    setting = ProcessSetting(lambda: values[-1], values.append)
    wishes: list[tuple[int, str]] = []
    for number, (is_wish, owner) in enumerate(moves):
        wishes = [wish for wish in wishes if wish[0] != owner]
        if is_wish:
            wishes.append((owner, f"wish {number}"))
            setting.want(*wishes[-1])
        else:
            setting.give_up(owner)
        assert values[-1] == (wishes[-1][1] if wishes else BEFORE)


def test_what_was_set_between_two_engines_is_found_again() -> None:
    values = ["first"]
    setting = ProcessSetting(lambda: values[-1], values.append)
    setting.want("engine", "its own")
    setting.give_up("engine")
    values.append("second")
    setting.want("engine", "its own")
    setting.give_up("engine")
    assert values[-1] == "second"


TWO_ENGINES = """
import random, sys
import numpy, torch
from penstock import LLM, SamplingParams

def process():
    generators = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
    return torch.get_num_threads(), generators

torch.set_num_threads(3)
torch.manual_seed(5)
before = process()
engines = {
    number: LLM("demo", device="cpu", num_threads=number, max_num_seqs=2, kv_cache_memory_bytes=8 << 20)
    for number in (1, 2)
}
for number in map(int, sys.argv[1:]):
    for engine in engines.values():
        engine.generate("To be", SamplingParams(max_tokens=3, temperature=0.7))
    print(torch.get_num_threads())
    engines.pop(number).close()
assert process() == before
"""


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2])))
@pytest.mark.slow
def test_the_last_engine_that_ends_leaves_the_process_as_the_first_one_found_it(order: tuple[int, ...]) -> None:
    command = [sys.executable, "-c", TWO_ENGINES, *map(str, order)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    # The threads of the engine that began last, as long as it is there.
    assert printed.split() == ["2", str(order[1])]
