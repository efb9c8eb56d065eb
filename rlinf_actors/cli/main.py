"""Entry point of `rlinf-actors`.

Imports click only after the first word is known, and never for an emergency stop.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from rlinf_actors.platforms import end_elsewhere

REAL_TIME = 10
"""SCHED_FIFO priority of an emergency stop: above ordinary processes, below the kernel threads of device drivers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rlinf-actors` with *arguments*, by default those of this process, and return the exit code."""
    end_elsewhere("rlinf-actors")
    if any(map(_is_closed, (0, 1, 2))):  # only then, because importing procfs delays an emergency stop
        from rlinf_actors.procfs import open_standard_descriptors

        open_standard_descriptors()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["estop"]:  # importing click would delay it
        hurry()
        from rlinf_actors.cli import estop

        return estop.main(words[1:])
    import gc

    gc.set_threshold(50_000)  # imports leave little garbage, and take longer with many collections
    from rlinf_actors.cli.app import run

    return run(words)


def _is_closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def hurry() -> None:
    """Raise the scheduling priority of this process, so that an emergency stop is not delayed. Without the permission
    to do so (root, CAP_SYS_NICE, or LimitRTPRIO= of a unit), change nothing.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REAL_TIME))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


if __name__ == "__main__":
    sys.exit(main())
