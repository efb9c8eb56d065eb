"""What the sockets ask of whoever knows the keys."""

from __future__ import annotations

from typing import Protocol

from rlinf_actors.security.members import Member


class Gate(Protocol):
    """Decides whom a process lets in."""

    def admit(self, public_key: str) -> Member | None:
        """Who the holder of this key is; None: it must not come in. Any thread, and cheap: every frame asks."""

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        """A connection was turned away, or several. Loop thread.

        Args:
            public_key: that it came with; "" if it never got so far (no key, no CURVE, wrong server key).
            address: of the peer, "" if unknown.
            why: what is known of it beside what `admit` knows.
            times: so many were.
        """
