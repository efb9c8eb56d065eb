"""Workers of test_mixed_interpreters.py: importable by Python 3.10 to 3.13, with numpy 1, numpy 2 or none."""

from __future__ import annotations

import math
import pathlib
import sys
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors import Channel, Worker
from rlinf_actors.errors import ProtocolMismatchError


@dataclass
class Reading:
    """A value of a class that every node can import."""

    name: str
    values: list[float] = field(default_factory=list)
    path: pathlib.PurePath = field(default_factory=lambda: pathlib.PurePosixPath("/dev/arm0"))


class ArmFault(Exception):
    """An error of a class that every node can import."""

    def __init__(self, joint: int) -> None:
        super().__init__(f"joint {joint} is stuck")
        self.joint = joint


def half(value: float) -> float:
    return value / 2


VALUES = [
    None, 1, 1 << 70, 2.5, math.inf, "text", "__main__", b"x" * 300_000, {"nested": [(1, {2})]}, pathlib.Path("/a/b"),
    Reading("arm", [1.0, 2.0]), half, math.sqrt, Reading, ArmFault,
]  # fmt: skip


def arrays() -> dict[str, Any]:
    """Arrays of all kinds, small and large; {} without numpy."""
    try:
        import numpy as np
    except ImportError:
        return {}
    numbers = np.arange(12)
    found = {f"kind {kind}": numbers.astype(kind).reshape(3, 4) for kind in "?bhilqBHILQefdgFD"}
    return {
        **found,
        "large": np.arange(100_000.0),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "strided": np.arange(12)[::2],
        "big-endian": np.arange(5, dtype=">f4"),
        "large and big-endian": np.arange(50_000, dtype=">i8"),
        "structured": np.array([(1, 2.5, "abc")], dtype=[("a", "<i4"), ("b", ">f8"), ("c", "U3")]),
        "record": np.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
        "objects": np.array([1, "x", None, {"a": 2}], dtype=object),
        "texts": np.array(["a", "bcd"]),
        "dates": np.array(["2020-01-01"], dtype="M8[D]"),
        "no dimension": np.array(3.5),
        "empty": np.zeros((0, 3)),
        "masked": np.ma.array([1, 2, 3], mask=[0, 1, 0]),
        "scalars": [np.float32(1.5), np.int64(3), np.bool_(True), np.str_("x"), np.datetime64("2020")],
        "types": [np.dtype([("a", ">i2")]), np.float32, np.add],
    }


def same(got: Any, sent: Any) -> bool:
    """True if both are equal, arrays in their types, orders of bytes and values."""
    if isinstance(sent, dict):
        return got.keys() == sent.keys() and all(same(got[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return len(got) == len(sent) and all(map(same, got, sent))
    if hasattr(sent, "dtype") and not isinstance(sent, type):
        return type(got) is type(sent) and str(got.dtype) == str(sent.dtype) and got.tolist() == sent.tolist()
    return type(got) is type(sent) and bool(got == sent)


class Mixed(Worker):
    def versions(self) -> tuple[int, int]:
        """The minor version of Python, and the major one of numpy: 0 for none."""
        try:
            import numpy
        except ImportError:
            return sys.version_info[1], 0
        return sys.version_info[1], int(numpy.__version__.partition(".")[0])

    def back(self, value: Any, arrays_too: bool) -> Any:
        assert same(value, expected(arrays_too))
        return value

    def apply(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def fail(self, deep: bool) -> None:
        if deep:
            raise ArmFault(3) from KeyError("cause")
        raise ValueError("bad")

    def random(self) -> Any:
        import numpy

        return numpy.random.default_rng(1)

    def by_value(self) -> Any:
        return lambda: 1

    def say(self, group: str, arrays_too: bool) -> None:
        self.send(expected(arrays_too), group, 0)

    def hear(self, group: str, arrays_too: bool) -> bool:
        return same(self.recv(group, 0), expected(arrays_too))

    def say_by_value(self, group: str) -> None:
        self.send(lambda: 1, group, 0)
        self.send("next", group, 0)

    def hear_refused(self, group: str) -> tuple[str, Any]:
        try:
            self.recv(group, 0)
        except ProtocolMismatchError as error:
            return str(error), self.recv(group, 0)
        return "nothing was refused", None

    def say_failure(self, group: str) -> None:
        self.send(ArmFault(5), group, 0)

    def hear_failure(self, group: str) -> tuple[str, int]:
        got = self.recv(group, 0)
        return type(got).__name__, got.joint

    def share(self, groups: Any, first: str, arrays_too: bool) -> bool:
        mine = expected(arrays_too) if self._group_name == first else None
        return same(self.broadcast(mine, groups=groups), expected(arrays_too))

    def put(self, channel: Channel, arrays_too: bool) -> None:
        channel.put(expected(arrays_too))

    def take(self, channel: Channel, arrays_too: bool) -> bool:
        return same(channel.get(), expected(arrays_too))

    def take_some(self, channel: Channel, count: int) -> list[Any]:
        return [channel.get() for _ in range(count)]

    def put_by_value(self, channel: Channel) -> None:
        channel.put(lambda: 1)
        channel.put("next")

    def take_refused(self, channel: Channel) -> str:
        try:
            channel.get()
        except ProtocolMismatchError as error:
            return str(error)
        return "nothing was refused"

    def take_by_value(self, channel: Channel) -> list[Any]:
        return [channel.get()(), channel.get()]

    async def stream(self, arrays_too: bool) -> Any:
        for _ in range(3):
            yield expected(arrays_too)


class Arm(Worker):
    """Has a robot, with its lease."""

    def on_lease_lost(self) -> None:
        """The arm of these tests has nothing to stop."""

    def about(self) -> tuple[str, int, bool]:
        return self.hardware_infos[0].address, sys.version_info[1], self.lease_page.held()

    def report(self, channel: Channel, count: int) -> None:
        for n in range(count):
            channel.put(Reading("arm", [float(n)]))


def expected(arrays_too: bool) -> list[Any]:
    """What all send one another."""
    return [*VALUES, arrays()] if arrays_too else VALUES
