"""One updating line on a terminal while the nodes of a cluster are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.process import Runtime

FIRST_S = 2.0
EVERY_S = 1.0


@contextlib.asynccontextmanager
async def waiting_line(runtime: Runtime, wanted: int) -> AsyncIterator[None]:
    """Show how many nodes are there, from FIRST_S on; nothing where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    tasks = Tasks()
    tasks.start(_show(runtime, wanted), "showing which nodes are there", expected=RlinfActorsError)  # the wait tells it
    try:
        yield
    finally:
        await tasks.close()


async def _show(runtime: Runtime, wanted: int) -> None:
    start, shown = time.monotonic(), False
    try:
        await asyncio.sleep(FIRST_S)
        while True:
            status = await runtime.status(None)
            here = [node.report.hostname for node in status.nodes if node.state == "ready"]
            waited = time.monotonic() - start
            line = f"waiting for nodes: {len(here)} of {wanted} ({', '.join(here) or 'none'}), {waited:.0f} s"
            sys.stderr.write(f"\r\x1b[2K{line}")
            sys.stderr.flush()
            shown = True
            await asyncio.sleep(EVERY_S)
    finally:
        if shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
