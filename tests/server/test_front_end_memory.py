"""Memory of a front end's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The front end ends at the first check of its start. Then threads free arrays of megabytes, as decoders of media do,
# below small ones that stay.
FREED = """
import sys, threading
import numpy as np, psutil
from penstock.server.processes import front_end

class Ended(Exception):
    pass

def end(*_):
    raise Ended

front_end.check_start = end
class Arguments:
    options = config = None
if sys.argv[1] == "front end":
    try:
        front_end.serve_http(Arguments, None)
    except Ended:
        pass
before = psutil.Process().memory_info().rss
stay, done, over = [], threading.Barrier(7), threading.Event()

def decode():
    for _ in range(2):
        arrays = [np.ones(3 << 17) for _ in range(5)]
        stay.append([bytes(2000 + size) for size in range(20)])
        del arrays
    done.wait()
    over.wait()

for _ in range(6):
    threading.Thread(target=decode).start()
done.wait()
print((psutil.Process().memory_info().rss - before) >> 20)
over.set()
"""


def kept_mib(where: str) -> int:
    return int(subprocess.run([sys.executable, "-c", FREED, where], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_threads_of_a_front_end_free_goes_back_to_the_system() -> None:
    assert kept_mib("front end") < 10
