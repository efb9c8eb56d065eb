"""Send a launch, or ranks to add, to the head: in one message, or in parts if there are many workers. Loop thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.model.restart import launch_of
from rlinf_actors.net.rpc import PartsMissingError
from rlinf_actors.wire.client_messages import Done, Launch, Launched
from rlinf_actors.wire.control_codec import TooLongError
from rlinf_actors.wire.launch_messages import PART_RANKS, LaunchPart, parts_of
from rlinf_actors.wire.resize_messages import AddRanks

if TYPE_CHECKING:
    from rlinf_actors.runtime.runtime import Runtime

TRIES = 5
"""How often a launch is sent because the head was restarted between two parts."""


async def send_launch(
    runtime: Runtime, message: Launch | AddRanks, timeout: float | None, on_reply: Callable[[Launched], None]
) -> None:
    """Send *message* to the head, and wait for its answer. Other work of the loop goes on between two parts.

    *timeout* is the time for each answer, in seconds. *on_reply* is called with the answer as it arrives.
    """
    if len(message.workers) <= PART_RANKS:
        try:
            await runtime.ask(message, Launched, timeout, on_reply)
            return
        except TooLongError:  # of environment variables; their workers share most of them
            if len(message.workers) < 2:
                raise
    last = message.workers[-1]
    launch = launch_of(last.id) if isinstance(message, Launch) else last.id
    for left in reversed(range(TRIES)):
        count = 0
        try:
            for workers in parts_of(message.workers[:-1]):
                part = LaunchPart(message.namespace, message.group, launch, count, workers)
                await runtime.ask(part, Done, timeout)
                count += 1
            await runtime.ask(replace(message, workers=[last], parts=count), Launched, timeout, on_reply)
            return
        except PartsMissingError:
            if not left:
                raise
