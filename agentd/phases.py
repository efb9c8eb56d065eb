"""The life cycle of an agent's session with the head, as a table."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from rlinf_actors.errors import ProtocolError


class Phase(str, enum.Enum):
    """How the session with the head is."""

    JOINING = "joining"
    JOINED = "joined"
    RESETTING = "resetting"
    DRAINING = "draining"
    ENDED = "ended"


PHASES: Mapping[Phase, Mapping[str, Phase]] = {
    Phase.JOINING: {
        "welcomed": Phase.JOINED,
        "failed": Phase.JOINING,
        "refused": Phase.ENDED,
        "cut_off": Phase.RESETTING,
        "drain": Phase.DRAINING,
    },
    Phase.JOINED: {
        "welcomed": Phase.JOINED,
        "forgotten": Phase.JOINING,
        "cut_off": Phase.RESETTING,
        "drain": Phase.DRAINING,
    },
    Phase.RESETTING: {"empty": Phase.JOINING, "drain": Phase.DRAINING},
    Phase.DRAINING: {"welcomed": Phase.DRAINING, "empty": Phase.ENDED},
    Phase.ENDED: {},
}
"""RESETTING: this incarnation is over; its workers are ended before the next one says hello."""


def step(phase: Phase, event: str) -> Phase:
    """The phase after *event*.

    Raises:
        ProtocolError: it cannot happen in this phase; a fault of ours.
    """
    try:
        return PHASES[phase][event]
    except KeyError:
        raise ProtocolError(f"{event!r} is not expected of a session that is {phase.value}") from None
