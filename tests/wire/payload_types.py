"""Importable classes that travel in payload tests."""

from __future__ import annotations

import collections
import enum
import pickle
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Frozen:
    a: int
    b: Any = None


@dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: int
    y: str


@dataclass
class Model:
    name: str
    lock: Any = field(default_factory=threading.Lock)


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Buffers:
    """As Arrow's: it gives pickle its memory."""

    def __init__(self, raw: Any) -> None:
        self.raw = memoryview(raw)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return Buffers, (pickle.PickleBuffer(self.raw),)


class NeedsTwo(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class NeedsTwoInNew(Exception):
    def __new__(cls, code: int, text: str):
        return super().__new__(cls, code, text)


class KeywordOnly(ValueError):
    def __init__(self, *, where: str) -> None:
        super().__init__(f"at {where}")
        self.where = where


class Unpicklable(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class BadStr(Exception):
    def __str__(self) -> str:
        raise KeyError("nothing to show")


class LikesProperties(Exception):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._n = n

    @property
    def doubled(self) -> int:
        return self._n * 2


class ExitLike(BaseException):
    pass
