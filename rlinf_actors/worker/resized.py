"""Updates a worker when its group gains or loses ranks: `Worker._world_size` and WORLD_SIZE."""

from __future__ import annotations

import os

from msgspec.structs import replace

from rlinf_actors import environ_block
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.worker import Worker


def resized(_link: bytes, frame: frames.Frame, _parts: AuthenticatedParts) -> None:
    """Handle a Resized frame of the group's owner. I/O thread only, so it runs beside a method that is under way."""
    assert isinstance(frame, frames.Resized)
    context = worker_context.current()
    if context is not None:
        context.spec = replace(context.spec, world_size=frame.world_size)
    if "WORLD_SIZE" in os.environ:  # for process groups that are made from now on
        environ_block.replace({"WORLD_SIZE": str(frame.world_size)})
    if Worker.current_worker is not None:
        Worker.current_worker._world_size = frame.world_size
