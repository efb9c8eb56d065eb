"""Entry point of `rlinf-actors`.

Imports click and rich only after a check that the extra [cli] is installed, and never for an emergency stop.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

MISSING = 69
"""Exit code (EX_UNAVAILABLE) if click or rich is not installed."""
REAL_TIME = 10
"""SCHED_FIFO priority of an emergency stop: above ordinary processes, below the kernel threads of device drivers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rlinf-actors` with *arguments*, by default those of this process, and return the exit code."""
    if any(map(_is_closed, (0, 1, 2))):  # only then, because importing procfs delays an emergency stop
        from rlinf_actors.procfs import open_standard_descriptors

        open_standard_descriptors()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["estop"]:  # importing click and rich would delay it
        hurry()
        from rlinf_actors.cli import estop

        return estop.main(words[1:])
    import importlib.util

    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"rlinf-actors needs {' and '.join(missing)}: pip install 'rlinf-actors[cli]'", file=sys.stderr)
        return MISSING
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
