"""A server of a Board without a head."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

from board_kit import HOSTILE

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.sampling.sample import Board
from rlinf_actors.serve.app import App, serving
from rlinf_actors.serve.guard import Guard
from rlinf_actors.wire.stack_values import WorkerStacks

TOKEN = "a-token-of-the-tests-only"


@contextlib.asynccontextmanager
async def server(
    found: Board, hosts: tuple[str, ...] = (), endpoint: str = "tcp://10.0.0.1:6380"
) -> AsyncIterator[SimpleNamespace]:
    """Serve a board. The value has `port`, `app`, `sampler` and `said`, the lines of each log file, and
    `asked`, those that were read; stacks of workers are answered with their ids.
    """
    said = [HOSTILE]
    asked: list[tuple[str, ...]] = []

    async def stacks(node_id: str, job: str, ids: list[str]) -> list[WorkerStacks]:
        return [WorkerStacks(id, HOSTILE) for id in ids]

    async def last_lines(node_id: str, job: str, name: str, most: int) -> list[str]:
        asked.append((node_id, job, name))
        if name.endswith(".out") and not said:
            raise RlinfActorsError(f"there is no log file {HOSTILE}")
        return said[-most:]

    sampler = SimpleNamespace(board=found, endpoint=endpoint, every_s=5.0, stacks=stacks, last_lines=last_lines)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        app = App(sampler, Guard(port, TOKEN, hosts), lambda worker, one: [worker.name, one.method])
        async with serving(app.make(), listener):
            yield SimpleNamespace(port=port, app=app, sampler=sampler, said=said, asked=asked)
            app.close()
