"""The seam between a Channel and what is behind it: a host process, or a queue in this one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf_actors.channel.taking import Taking
from rlinf_actors.runtime.asyncwork import AsyncWork


@dataclass(frozen=True)
class Shown:
    """A waiting item for people. `value` is None with `whole` False where the item is too large to show."""

    value: Any
    nbytes: int
    weight: float
    again: bool
    whole: bool = True


class Backend(Protocol):
    """Any method from any thread but the I/O thread. Limits of time are in seconds, None for none."""

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        """Under way; ends when the item is in."""

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Taking[Any]:
        """Under way; ends when an item is here."""

    def batch(self, key: Hashable, target: float, timeout: float | None) -> Taking[list[Any]]:
        """Under way; ends when the batch is complete."""

    def look(self, key: Hashable) -> tuple[int, bool]:
        """Number of waiting items, and whether a put would wait."""

    def show(self) -> tuple[bool, list[tuple[Any, int, list[Shown]]]]:
        """Whether it is closed; and for each key the number of waiting items and the first of them."""

    def close(self) -> None:
        """No more puts."""
