"""Whether what listens at the head's address is the head, where nothing is heard of it. Loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlinf_actors.errors import NotTheHeadError
from rlinf_actors.net.link import Found, Network
from rlinf_actors.net.loop import Tasks

SURE_S = 1.0
"""For how long handshakes must fail before whoever listens is looked at: one that ends in a handshake looks the same,
and so does a head that is started at that moment."""
HANDSHAKES = 3
"""As many must have failed where a head listens; another program is no head at once."""


class Doubt:
    """What is known of the other end of a connection that does not come about.

    Args:
        network: to look with.
        endpoint: of the head.
        on_other: called with the error when it is certain that another listens there; libzmq tries for ever.
        explains: whether to look where nothing was ever heard, for `why`; not where many would at one moment: what
            looks at a head that stands still fills its queue of connections.
    """

    def __init__(
        self, network: Network, endpoint: str, on_other: Callable[[NotTheHeadError], None], explains: bool
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._on_other = on_other
        self._explains = explains
        self._why = self._seen = ""
        self._failed = 0
        self._tasks = Tasks()
        self._looking: asyncio.Task[None] | None = None

    def failed(self, why: str, for_good: bool) -> None:
        """A handshake has failed; *for_good*: and is not tried again."""
        self._why = why
        self._failed += 1
        if self._looking is None and not for_good:
            self._looking = self._tasks.start(self._look(), "looking who listens at the head's address")

    def heard(self) -> None:
        """The head has said something."""
        self._why, self._seen, self._failed, self._explains = "", "", 0, False

    def again(self) -> None:
        """The connection is made anew, or closed for good."""
        self._why, self._seen, self._failed = "", "", 0
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def why(self) -> str:
        """Why nothing was heard, as far as can be said, and what to do."""
        if not self._why and self._explains:
            return (await self._network.identify(self._endpoint)).value
        return self._seen or self._why or "is it running, and is the address right?"

    async def _look(self) -> None:
        try:
            await asyncio.sleep(SURE_S)
            if self._failed:
                found = await self._network.identify(self._endpoint)
                self._seen = "" if found is Found.KEYED else found.value
                if found is Found.OTHER or (found is Found.KEYED and self._failed >= HANDSHAKES):
                    said = f"this is not the head, at {self._endpoint}: {self._seen or self._why}"
                    self._on_other(NotTheHeadError(said))
        finally:  # also where it fails: the next handshake that does looks again
            if self._looking is asyncio.current_task():
                self._looking = None
