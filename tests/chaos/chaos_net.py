"""The address of a world's head, and one process's view of the network."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlinf_actors.net.link import Reachability

if TYPE_CHECKING:
    from chaos_world import World

HEAD = "ipc:///head"


class Seen:
    """One process's view of the network: behind a cut it reaches no endpoint."""

    def __init__(self, world: World, who: Any) -> None:
        self._world = world
        self._who = who

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.network, name)

    async def check_reachability(self, endpoint: str, timeout_s: float = 1.0) -> Reachability:
        if self._who in self._world.cut:
            await asyncio.sleep(timeout_s)
            return Reachability.SILENT
        return await self._world.network.check_reachability(endpoint, timeout_s)
