"""Ctrl-C during a step or a critical block: it is raised after the block, and handlers are restored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.engine.interrupts import InterruptAfterwards, InterruptsBetweenSteps


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_block(*, times: int, done: list[str]) -> None:
    with InterruptAfterwards():
        for _ in range(times):
            interrupt()
        done.append("all of it")


def test_the_block_finishes_before_the_interrupt() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_block(times=1, done=done)
    assert done == ["all of it"]


def test_a_second_interrupt_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_block(times=2, done=done)
    assert done == []


def test_the_former_handler_is_called_and_comes_back() -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    handler = signal.getsignal(signal.SIGINT)
    with InterruptAfterwards():
        interrupt()
        assert calls == []
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_without_an_interrupt_the_former_handler_comes_back_too() -> None:
    with InterruptAfterwards():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with InterruptAfterwards():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_are_left_alone() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with InterruptAfterwards():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


def test_an_interrupt_in_a_step_waits_for_its_end() -> None:
    interrupts = InterruptsBetweenSteps()
    with interrupts:
        interrupts.begin_step()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.end_step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_between_steps_does_not_wait() -> None:
    interrupts = InterruptsBetweenSteps()
    with interrupts:
        interrupts.begin_step()
        interrupts.end_step()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupts.begin_step()
        interrupts.end_step()


def test_a_second_interrupt_in_a_step_does_not_wait() -> None:
    interrupts = InterruptsBetweenSteps()
    with interrupts:
        interrupts.begin_step()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupts.end_step()


def test_loops_may_end_in_another_order_than_they_began() -> None:
    first, second = InterruptsBetweenSteps(), InterruptsBetweenSteps()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    second.__exit__(None, None, None)
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_loop_in_another_thread_is_left_alone() -> None:
    def work() -> None:
        with InterruptsBetweenSteps() as interrupts:
            interrupts.begin_step()
            interrupts.end_step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
