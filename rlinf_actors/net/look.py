"""Whether anything listens at an endpoint: what tells a process that is gone from a network that is cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from rlinf_actors.net.address import split_address
from rlinf_actors.net.link import Sight
from rlinf_actors.net.silence import LOOK_TIMEOUT_S

log = logging.getLogger(__name__)


async def look_at(endpoint: str, timeout_s: float = LOOK_TIMEOUT_S) -> Sight:
    """Open a connection to *endpoint* and close it again.

    The kernel answers for a process that is stopped or busy, and refuses for one that is gone. Cancelling gives up.

    Args:
        endpoint: of ZeroMQ, tcp or ipc.
        timeout_s: how long the answer may take, in seconds.
    """
    opening: Coroutine[Any, Any, Any]
    if endpoint.startswith("ipc://"):
        opening = asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
    else:
        opening = asyncio.open_connection(*split_address(endpoint, "endpoint"))
    try:
        _, writer = await asyncio.wait_for(opening, timeout_s)
    except (ConnectionRefusedError, FileNotFoundError):
        return Sight.REFUSED
    except (OSError, asyncio.TimeoutError) as error:
        if endpoint.startswith("ipc://"):
            return Sight.LISTENS  # its queue is full, perhaps; no network lies between us
        log.debug("%s is out of reach: %s", endpoint, error or type(error).__name__)
        return Sight.SILENT
    writer.close()
    return Sight.LISTENS
