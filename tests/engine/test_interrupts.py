from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.engine.interrupts import InterruptAfterwards


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
