"""The switch interval of drivers: how long a thread of the user that computes may keep the I/O thread waiting.

A thread that wants the interpreter's lock asks for it after this time. With Python's 5 ms, a call beside a thread that
computes takes 20 ms, because its answer passes several threads.
"""

from __future__ import annotations

import sys

PYTHONS_S = 0.005
DRIVERS_S = 0.0005


def shorten() -> bool:
    """Set the switch interval of this process to DRIVERS_S, unless the user has set another than Python's.

    Return True if it was set, and is to be restored.
    """
    return _replace(PYTHONS_S, DRIVERS_S)


def restore() -> None:
    """Undo a `shorten` that returned True. Do nothing if the user has set another interval since."""
    _replace(DRIVERS_S, PYTHONS_S)


def _replace(old: float, new: float) -> bool:
    found = round(sys.getswitchinterval(), 6) == old
    if found:
        sys.setswitchinterval(new)
    return found
