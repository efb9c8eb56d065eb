"""Refusals on their way to the head's event log, as a worker, its template and its agent hold them. Pure.

Each of the three says the first of a kind at once, and then how many more; where nobody listens (the head is away, the
template is between two agentds, a queue is full) they stay here: bounded, and counted.
"""

from __future__ import annotations

from msgspec.structs import replace

from rlinf_actors.security.refusal_tally import KINDS, RefusalTally
from rlinf_actors.wire.agent_messages import Refusal, RefusalReport

TEXT_CHARS = 200
KINDS_OF_ONE = 16
"""Of one worker: it leaves room for the others of its node."""


class RefusalNotes:
    """What is to be told.

    Args:
        window_s: seconds between two numbers of one kind: at most these are lost when the process is killed.
    """

    def __init__(self, window_s: float) -> None:
        self._tally: RefusalTally[Refusal] = RefusalTally(window_s, KINDS, KINDS_OF_ONE)

    def add(self, refusal: Refusal, now: float) -> bool:
        """Somebody was refused; returns whether there is something to tell now."""
        if len(refusal.text) > TEXT_CHARS:
            refusal = replace(refusal, text=f"{refusal.text[: TEXT_CHARS - 1]}…")
        return self._tally.note(refusal.worker, refusal.text, refusal, now, refusal.times)

    def take(self, now: float) -> RefusalReport | None:
        """What is to be told now, None for nothing; whoever cannot tell it adds it again."""
        due = self._tally.take(now)
        refusals = []
        for one in due:
            text = f"others, the last of them {one.what.text}" if one.others else one.what.text
            refusals.append(replace(one.what, text=text, times=one.times))
        return RefusalReport(refusals) if refusals else None

    def next_deadline(self) -> float:
        """When `take` may have something, infinity for never."""
        return self._tally.next_deadline()
