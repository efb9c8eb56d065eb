"""What was refused, for the event log: the first of each kind at once, repetitions by their number. Pure.

House rule: whoever is refused can make us write a line a minute, and not more: what a stranger sends must not push
everything else out of the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinf_actors.head.commands import Emit, Record

WINDOW_S = 60.0
KINDS = 64
"""So many kinds are told apart within a window; what comes on top is counted together."""


@dataclass
class _Kind:
    until: float
    text: str = ""
    more: int = 0


class Refusals:
    """All refusals of a head.

    Args:
        emit: takes commands.

    Attributes:
        count: so many by now.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._others = _Kind(math.inf)
        self.count = 0

    def note(self, who: str, kind: str, text: str, now: float, times: int = 1) -> None:
        """Something was refused, *times* times.

        Args:
            who: was refused; a refusal is a repetition of the one before if *who* and *kind* are the same.
            kind: of the refusal.
            text: one line for people.
            now: the time.
        """
        self.count += times
        known = self._kinds.get((who, kind))
        if known is not None:
            known.text, known.more = text, known.more + times
        elif len(self._kinds) < KINDS:
            self._kinds[who, kind] = _Kind(now + WINDOW_S, text, times - 1)
            self._emit(Record("refused", text))
        else:
            self._others.until = min(self._others.until, now + WINDOW_S)
            self._others.text, self._others.more = text, self._others.more + times

    def tick(self, now: float) -> None:
        """Time has passed: say how often what was said has happened since."""
        for key, kind in [(key, kind) for key, kind in self._kinds.items() if now >= kind.until]:
            del self._kinds[key]
            if kind.more:
                self._kinds[key] = _Kind(now + WINDOW_S)
                self._emit(Record("refused", f"{kind.text} ({kind.more} more in the last {WINDOW_S:.0f} s)"))
        if now >= self._others.until:
            others, self._others = self._others, _Kind(math.inf)
            text = (
                f"{others.more} more refusals of other kinds in the last {WINDOW_S:.0f} s, the last one: {others.text}"
            )
            self._emit(Record("refused", text))

    def next_deadline(self) -> float:
        """When `tick` has something to say, infinity for never."""
        return min([self._others.until, *(kind.until for kind in self._kinds.values())])
