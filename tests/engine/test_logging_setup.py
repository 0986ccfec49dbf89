"""Each case runs in a process of its own: logging is a process's own, and pytest sets it up for itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PREAMBLE = "import logging; from penstock.observability.logging import configure_logging; "
SPEAK = "logger = logging.getLogger('penstock.engine'); logger.info('hello'); logger.debug('details')"


def stderr_of(code: str, level: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_LOG_LEVEL"}
    if level is not None:
        environment["PENSTOCK_LOG_LEVEL"] = level
    result = subprocess.run([sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, env=environment)
    assert result.stdout == ""
    return result.stderr


def test_a_message_is_one_line_on_standard_error() -> None:
    log = stderr_of("configure_logging(); " + SPEAK)
    assert log.count("\n") == 1
    assert log.startswith("I ")
    assert log.endswith(" hello\n")


def test_setting_up_twice_shows_a_message_once() -> None:
    assert stderr_of("configure_logging(); configure_logging(); " + SPEAK).count("hello") == 1


def test_nothing_is_set_up_by_importing() -> None:
    assert stderr_of("import penstock; penstock.LLM; " + SPEAK) == ""


@pytest.mark.parametrize(("level", "shown"), [("debug", ["hello", "details"]), ("INFO", ["hello"]), ("error", [])])
def test_the_environment_sets_the_level(level: str, shown: list[str]) -> None:
    log = stderr_of("configure_logging(); " + SPEAK, level)
    assert [word for word in ("hello", "details") if word in log] == shown


def test_debug_messages_say_where_they_come_from() -> None:
    assert "penstock.engine:1 details" in stderr_of("configure_logging(); " + SPEAK, "debug")


def test_a_level_that_does_not_exist_is_named() -> None:
    log = stderr_of("configure_logging()", "loud")
    assert "PENSTOCK_LOG_LEVEL='loud' is not valid. Allowed: debug, info, warning, error, critical." in log


def test_an_applications_own_setup_is_respected() -> None:
    own = "logging.basicConfig(format='app: %(message)s', level=logging.INFO); configure_logging(); "
    assert stderr_of(own + SPEAK) == "app: hello\n"


def test_a_setup_that_comes_later_does_not_show_messages_twice() -> None:
    assert stderr_of("configure_logging(); logging.basicConfig(level=logging.INFO); " + SPEAK).count("hello") == 1


def test_a_replaced_standard_error_is_followed() -> None:
    redirected = "import io, sys; configure_logging(); sys.stderr = io.StringIO(); "
    assert stderr_of(redirected + SPEAK) == ""


FORGED = "a\\nI 00:00:00 FORGED\\r\\x1b[2K\\x9b\\u2028\\u202e\\ud800"
FAIL = """
try:
    raise ValueError(data)
except ValueError:
    logger.exception("it failed")
"""


@pytest.mark.parametrize("who", ["penstock.engine", "asyncio"])
def test_no_text_forges_a_record_or_commands_the_terminal(who: str) -> None:
    log = stderr_of(f"configure_logging(); data = '{FORGED}'; logging.getLogger('{who}').warning('name=%s', data)")
    assert log.endswith(r"name=a\nI 00:00:00 FORGED\r\x1b[2K\x9b\u2028\u202e\ud800" + "\n")
    assert log.count("\n") == 1


def test_lines_of_a_traceback_are_indented_whatever_the_error_says() -> None:
    log = stderr_of(f"configure_logging(); data = '{FORGED}'; logger = logging.getLogger('penstock'){FAIL}")
    first, *others = log.splitlines()
    assert first.startswith("E ")
    assert first.endswith(" it failed")
    assert others[0] == "  Traceback (most recent call last):"
    assert others[-1] == r"  I 00:00:00 FORGED\r\x1b[2K\x9b\u2028\u202e\ud800"
    assert all(line.startswith("  ") for line in others)


def test_records_of_other_processes_are_shown_alike() -> None:
    """The log passes through two processes, as that of a server's core does."""
    pass_on = "levels = {'penstock': 20}; send_log(levels, lambda fields: sent.append(fields)); "
    log = stderr_of(
        f"from penstock.observability.logging import *; sent = []; {pass_on}data = '{FORGED}'; "
        f"logger = logging.getLogger('penstock'){FAIL}"
        f"logger.info(data); first, sent = sent, []; {pass_on}[write_sent(one, 'Engine 1: ') for one in first]; "
        "logger.handlers = []; configure_logging(); [write_sent(one) for one in sent]"
    )
    own = [line for line in log.splitlines() if not line.startswith("  ")]
    assert [line.split(" ", 2)[2] for line in own] == [
        "Engine 1: it failed",
        r"Engine 1: a\nI 00:00:00 FORGED\r\x1b[2K\x9b\u2028\u202e\ud800",
    ]
    assert "\n  Traceback (most recent call last):\n" in log


def test_what_threads_and_finalizers_raise_is_a_record_of_the_log() -> None:
    code = """
import threading
from penstock.observability.logging import log_uncaught_errors
configure_logging()
log_uncaught_errors()
def fail():
    raise ValueError("a\\nI 00:00:00 FORGED")
thread = threading.Thread(target=fail, name="penstock-\\x1b[31m")
thread.start()
thread.join()
class Failing:
    def __del__(self):
        fail()
Failing()
"""
    lines = stderr_of("pass" + code).splitlines()
    records = [line for line in lines if not line.startswith("  ")]
    assert [line[0] for line in records] == ["E", "E"]
    assert records[0].endswith(r"The thread penstock-\x1b[31m ended with an error")
    assert "Failing.__del__" in records[1]
    assert sum("FORGED" in line for line in lines) == 2
