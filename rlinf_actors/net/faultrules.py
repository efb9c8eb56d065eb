"""What faults there are, and when one strikes: points, actions, rules and their checks.

`net.faultpoints` makes the fault happen.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import FAULTS

_LINE = ("drop", "delay", "duplicate", "cut")
_MESSAGE = ("drop", "delay", "duplicate")
_START = ("delay", "refuse")

POINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "transport.connect": _START,
        "transport.send": _LINE,
        "transport.receive": _LINE,
        "rpc.request": (*_MESSAGE, "refuse"),
        "rpc.reply": _MESSAGE,
        "rpc.notice": _MESSAGE,
        "spawn.template": _START,
        "spawn.fork": _START,
        "spawn.exec": _START,
    }
)
"""Every point, and what can happen there; docs/reliability.md says what each means."""

ACTIONS = ("drop", "delay", "duplicate", "cut", "refuse")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to happen where.

    Attributes:
        point: one of POINTS.
        action: one of ACTIONS that the point can do.
        seconds: of a delay: how long; of a cut: after how long it heals, 0 for when the rule ends.
        where: pattern (as in fnmatch) of what it strikes: an endpoint, a peer, a kind of message, a worker.
        chance: of striking, 0 to 1.
        times: how often at most, 0 for any number.
        skip: how many matches pass before the first that is struck.
        seed: of the chance.
        exists: the rule is on while this file exists, "" for always; ``{pid}`` in it is this process's number.
    """

    point: str
    action: str
    seconds: float = 0.0
    where: str = "*"
    chance: float = 1.0
    times: int = 0
    skip: int = 0
    seed: int = 0
    exists: str = ""


def check(fault: Fault, path: str = "") -> Fault:
    """Returns *fault*.

    Raises:
        ConfigError: no such point or action, or a number that cannot be; *path* says whose.
    """
    if fault.point not in POINTS:
        raise ConfigError(f"{fault.point!r} is no fault point; {_nearest(fault.point, POINTS)}", path=path)
    able = POINTS[fault.point]
    if fault.action not in ACTIONS:
        raise ConfigError(f"{fault.action!r} is no fault; {_nearest(fault.action, ACTIONS)}", path=path)
    if fault.action not in able:
        raise ConfigError(f"{fault.point} cannot {fault.action}; it can: {', '.join(able)}", path=path)
    if not 0 <= fault.seconds < float("inf") or (fault.action == "delay" and not fault.seconds):
        raise ConfigError(f"{fault.seconds!r} s is no time for a {fault.action}", path=path)
    if not 0 < fault.chance <= 1:
        raise ConfigError(f"chance is {fault.chance!r}; it must be above 0 and at most 1", path=path)
    if fault.times < 0 or fault.skip < 0:
        raise ConfigError("times and skip are numbers from 0 up", path=path)
    return fault


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    nearest = get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"did you mean {nearest!r}? Known: {', '.join(names)}"


class Rule:
    """A fault in force.

    Args:
        fault: checked.
        where: decides instead of the fault's pattern.

    Attributes:
        hits: how often it struck.
    """

    def __init__(self, fault: Fault, where: Callable[[str], bool] | None = None) -> None:
        self.fault = fault
        self.hits = 0
        self._matches = where or (lambda subject: fnmatchcase(subject, fault.where))
        self._passing = fault.skip
        self._random = random.Random(fault.seed)
        self._file = fault.exists

    def on(self) -> bool:
        """Whether the file that switches it is there, if it names one."""
        return not self._file or os.path.exists(self._file.replace("{pid}", str(os.getpid())))

    def strikes(self, point: str, subject: str) -> bool:
        """Whether it strikes this one; counts it. One thread at a time."""
        fault = self.fault
        if fault.point != point or (fault.times and self.hits >= fault.times):
            return False
        if not self._matches(subject) or not self.on():
            return False
        if self._passing:
            self._passing -= 1
            return False
        if fault.chance < 1 and self._random.random() >= fault.chance:
            return False
        self.hits += 1
        return True


def parse(plan: str) -> list[Fault]:
    """The faults of a plan: a JSON list of objects with the attributes of Fault.

    Raises:
        ConfigError: it is none.
    """
    try:
        faults = msgspec.json.decode(plan, type=list[Fault])
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no list of faults in JSON: {error}", path=FAULTS) from None
    return [check(fault, f"{FAULTS}[{n}]") for n, fault in enumerate(faults)]
