"""Classes whose instances travel."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

Step = namedtuple("Step", "observation reward")


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: int
    b: Any = None


@dataclass
class Counted:
    """Its constructor must not run again where it arrives."""

    value: Any
    scale: InitVar[int] = 1
    scaled: Any = field(init=False)
    made: ClassVar[int] = 0

    def __post_init__(self, scale: int) -> None:
        type(self).made += 1
        self.scaled = self.value * scale
        self.extra = "set after"


@dataclass
class Batch:
    observations: Any = None
    rewards: Any = None


class Tree:
    """A container as JAX and torch's pytrees have them."""

    def __init__(self, **leaves: Any) -> None:
        self.leaves = leaves

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["leaves"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.leaves == other.leaves

    __hash__ = None  # type: ignore[assignment]


class NeedsTwo(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
