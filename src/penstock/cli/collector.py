"""When a command's process looks for garbage: once its engine serves.

What starting makes, most of it the modules of libraries, stays for the process's life. Looking through it again and
again as it grows took up to a tenth of the time until the first character, and steps would wait for it later on.
"""

from __future__ import annotations

import gc


def postpone_collection() -> None:
    """Until `begin_collection`, or the process's end."""
    gc.disable()


def begin_collection() -> None:
    """From here on, and only among what is made from here on. Nothing changes where it was not postponed."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
