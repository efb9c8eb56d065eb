"""The process that owns this agentd: a driver, whose end is ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from rlinf_actors import procfs
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net.host import pid_start


def watch(pid: int, started: int, ended: Callable[[], None], stack: contextlib.AsyncExitStack) -> None:
    """Call *ended* once, from the running loop, when the process ends; not after *stack* is closed.

    Args:
        pid: its.
        started: when it began, in clock ticks since boot, so that nobody is mistaken for it; 0 if unknown.
        ended: see above.
        stack: ends the watch.

    Raises:
        RlinfActorsError: it is gone already.
    """
    loop = asyncio.get_running_loop()
    try:
        owner = procfs.pidfd_of(pid)
    except ProcessLookupError:
        raise RlinfActorsError(f"the owner, process {pid}, is gone already") from None
    stack.callback(os.close, owner)
    if started not in (0, pid_start(pid)):
        raise RlinfActorsError(f"the owner, process {pid}, is gone already; its pid is another's now")

    def gone() -> None:
        loop.remove_reader(owner)
        ended()

    loop.add_reader(owner, gone)
    stack.callback(loop.remove_reader, owner)
