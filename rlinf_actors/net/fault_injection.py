"""Fault injection: named points at which a test or a drill makes this process fail.

Users call `rlinf_actors.testing.faults`; the variable RLINF_ACTORS_FAULTS carries rules to other processes. While no
fault is active, a hook costs one read of `active`, which is None. Messages between a socket and a peer keep their
order: while one is held, all later ones wait behind it. Randomness comes only from the seed of each rule.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec

from rlinf_actors.conversion import nearest
from rlinf_actors.errors import ClusterTimeoutError, ConfigError
from rlinf_actors.net.loop import call_threadsafe
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
"""The fault points and the actions that each allows; docs/how-to/test-with-faults.md explains them."""

ACTIONS = ("drop", "delay", "duplicate", "cut", "refuse")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault that a test injects: where it happens (point), what happens (action), and to which messages or
    processes.

    Attributes:
        point: one of POINTS.
        action: one of ACTIONS that the point allows.
        seconds: for "delay" the length of the delay; for "cut" the time until the connection works again, 0 for as long
            as the fault is injected.
        where: an fnmatch pattern. Only subjects that match are affected. A subject is an endpoint, a peer, a kind of
            message or a worker, depending on the point.
        chance: probability, above 0 and at most 1, that a matching event is affected.
        times: most events that are affected, 0 for no limit.
        skip: number of matching events that pass before the first one is affected.
        seed: seed of the random numbers for *chance*.
        exists: the fault is active only while this file exists, "" for always; ``{pid}`` in it stands for this
            process's pid.
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
    """Return *fault* if it is valid.

    *path* says where the fault is written, for the error.

    Raises:
        ConfigError: the point or action does not exist, the point does not allow the action, or a number is out of
            range.
    """
    if fault.point not in POINTS:
        raise ConfigError(f"{fault.point!r} is no fault point; {_suggest(fault.point, POINTS)}", path=path)
    able = POINTS[fault.point]
    if fault.action not in ACTIONS:
        raise ConfigError(f"{fault.action!r} is no fault; {_suggest(fault.action, ACTIONS)}", path=path)
    if fault.action not in able:
        raise ConfigError(f"{fault.point} cannot {fault.action}; it can: {', '.join(able)}", path=path)
    if not 0 <= fault.seconds < float("inf") or (fault.action == "delay" and not fault.seconds):
        raise ConfigError(f"{fault.seconds!r} s is no time for a {fault.action}", path=path)
    if not 0 < fault.chance <= 1:
        raise ConfigError(f"chance is {fault.chance!r}; it must be above 0 and at most 1", path=path)
    if fault.times < 0 or fault.skip < 0:
        raise ConfigError("times and skip are numbers from 0 up", path=path)
    return fault


def _suggest(name: str, known: Iterable[str]) -> str:
    return f"did you mean {nearest(name, known)!r}? Known: {', '.join(known)}"


class Rule:
    """An active fault of this process, which decides for each event whether to affect it. `Faults` calls it under a
    lock.

    Args:
        fault: the fault, accepted by `check`.
        where: returns True for the subjects to affect; None to use the pattern `Fault.where`.

    Attributes:
        fault: as given.
        hits: number of events that were affected so far.
    """

    def __init__(self, fault: Fault, where: Callable[[str], bool] | None = None) -> None:
        self.fault = fault
        self.hits = 0
        self._matches = where or (lambda subject: fnmatchcase(subject, fault.where))
        self._passing = fault.skip
        self._random = random.Random(fault.seed)

    def on(self) -> bool:
        """Return True if the fault's file exists (`Fault.exists`) or the fault names no file. Else the fault affects
        nothing now.
        """
        file = self.fault.exists
        return not file or os.path.exists(file.replace("{pid}", str(os.getpid())))

    def strikes(self, point: str, subject: str) -> bool:
        """Return True if the fault affects this event, which counts as a hit then.

        Args:
            point: the fault point that the event passes.
            subject: the text that `Fault.where` is compared with, such as an endpoint or a kind of message.
        """
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
    """Return the faults in *plan*, a JSON list of objects with the attributes of Fault.

    Raises:
        ConfigError: *plan* is not such a list, or one of the faults is not valid.
    """
    try:
        faults = msgspec.json.decode(plan, type=list[Fault])
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no list of faults in JSON: {error}", path=FAULTS) from None
    return [check(fault, f"{FAULTS}[{n}]") for n, fault in enumerate(faults)]


_Held = collections.deque[tuple[float, Callable[[], object]]]


class _Effects(msgspec.Struct):
    """The effects of faults on the messages between one socket and one peer.

    Attributes:
        cut_by: the rule that cut the connection, None if none did. Messages are dropped while it is cut.
        cut_until: time of the loop until which the connection stays cut.
        held: by direction ("in", "out"), the delayed messages in order: (due time, function that delivers the message).
    """

    cut_by: Rule | None = None
    cut_until: float = 0.0
    held: dict[str, _Held] = msgspec.field(default_factory=dict)


class Faults:
    """All faults that are active in this process, and the messages that they delay. Any thread."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules = list(rules)
        self._effects: weakref.WeakKeyDictionary[object, dict[bytes, _Effects]] = weakref.WeakKeyDictionary()
        self._held = 0
        self._lock = threading.RLock()  # a collected socket may call in from a finalizer

    def connecting(self, owner: object, endpoint: str, loop: asyncio.AbstractEventLoop) -> None:
        """Apply the faults of the point transport.connect to a new link.

        "delay" holds back what the link sends. "refuse" drops all messages of the link for as long as the fault is
        active.

        Args:
            owner: the link.
            endpoint: the endpoint that the link connects to. `Fault.where` is compared with it.
            loop: the link's event loop.
        """
        with self._lock:
            rule = self._pick("transport.connect", endpoint)
            if rule is None:
                return
            if rule.fault.action == "delay":
                self._hold(owner, b"", "out", 1, lambda: None, loop.time() + rule.fault.seconds, loop)
            else:
                effects = self._effects_on(owner, b"")
                effects.cut_by, effects.cut_until = rule, float("inf")

    def carry(
        self,
        point: str,
        owner: object,
        peer: bytes,
        subject: str,
        deliver: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Deliver a message now or later, once, twice or not at all, as the active faults say.

        Args:
            point: the fault point that the message passes.
            owner: the socket, or end of the control connection, that sends or receives the message.
            peer: identity of the other end, b"" on a link.
            subject: the text that `Fault.where` is compared with.
            deliver: sends the message, or handles it.
            loop: runs *deliver* if the message is delayed.

        Raises:
            ClusterTimeoutError: a fault refused the request.
        """
        copies, due = 1, 0.0
        way = "in" if point == "transport.receive" else "out"
        with self._lock:
            effects = self._effects_on(owner, peer)
            if effects.cut_by is not None:
                if effects.cut_by in self._rules and effects.cut_by.on() and loop.time() < effects.cut_until:
                    return
                effects.cut_by = None
            rule = self._pick(point, subject)
            action = "" if rule is None else rule.fault.action
            if rule is not None and action == "cut":
                effects.cut_by, effects.cut_until = rule, loop.time() + (rule.fault.seconds or float("inf"))
            if action in ("cut", "drop"):
                return
            if action == "refuse":
                raise ClusterTimeoutError(f"a fault point refused {subject}")
            if action == "duplicate":
                copies = 2
            if rule is not None and action == "delay":
                due = loop.time() + rule.fault.seconds
            if due or effects.held.get(way):
                self._hold(owner, peer, way, copies, deliver, due, loop)
                return
        for _ in range(copies):
            deliver()

    def start(self, point: str, subject: str) -> None:
        """Apply the faults of a spawn.* point before a process is started. "delay" blocks the calling thread.

        *subject* is the text that `Fault.where` is compared with: the process to start.

        Raises:
            OSError: a fault refused the start (EAGAIN, as at the limit of processes).
        """
        with self._lock:
            rule = self._pick(point, subject)
        if rule is None:
            return
        if rule.fault.action == "refuse":
            raise OSError(errno.EAGAIN, f"a fault point refused {subject}")
        # The fault itself, not a wait for anything: a slow fork or exec blocks the thread that asks for it, and what
        # comes of that (beats that stay out, timers that are late) is what is to be seen.
        time.sleep(rule.fault.seconds)

    def _pick(self, point: str, subject: str) -> Rule | None:
        return next((rule for rule in self._rules if rule.strikes(point, subject)), None)

    def _effects_on(self, owner: object, peer: bytes) -> _Effects:
        return self._effects.setdefault(owner, {}).setdefault(peer, _Effects())

    def _hold(
        self,
        owner: object,
        peer: bytes,
        way: str,
        copies: int,
        deliver: Callable[[], object],
        due: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        held = self._effects_on(owner, peer).held.setdefault(way, collections.deque())
        due = max(due, held[-1][0] if held else 0.0)
        first = not held
        held.extend([(due, deliver)] * copies)
        self._held += copies
        if first:
            self._later(held, due, loop)

    def _later(self, held: _Held, due: float, loop: asyncio.AbstractEventLoop) -> None:
        call_threadsafe(loop, loop.call_at, due, self._release, held, loop)

    def _release(self, held: _Held, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver the delayed messages in *held* that are due now. Loop thread.

        A message stays first in the queue until it is delivered, so that no later one overtakes it.
        """
        while True:
            with self._lock:
                due, deliver = held[0]
                if due > loop.time():
                    self._later(held, due, loop)
                    return
            try:
                deliver()
            finally:
                with self._lock:
                    held.popleft()
                    self._held -= 1
                    left = bool(held)
                settle()
            if not left:
                return


active: Faults | None = None
"""The active faults of this process, None while there are none.

A hook must read this once into a variable, because another thread may set it to None. Only functions of this module set
it."""
_setting = threading.Lock()


def add(rule: Rule) -> None:
    """Make the fault of *rule* active in this process."""
    global active
    with _setting:
        if active is None:
            active = Faults()
        with active._lock:
            active._rules.append(rule)


def remove(rule: Rule) -> None:
    """End the fault of *rule* in this process.

    Connections that the fault cut work again. Messages that it delayed are still delivered at their times.
    """
    faults = active
    if faults is not None:
        with faults._lock:
            faults._rules.remove(rule)
    settle()


def settle() -> None:
    """Set `active` to None if no rule and no delayed message is left, so that fault points cost nothing."""
    global active
    with _setting:
        if active is not None:
            with active._lock:
                idle = not active._rules and not active._held
            active = None if idle else active


def load(plan: str | None) -> None:
    """Replace the active faults of this process by those in *plan*, the value of RLINF_ACTORS_FAULTS.

    None or "" changes nothing.

    Raises:
        ConfigError: *plan* is not a list of valid faults.
    """
    global active
    if not plan:
        return
    rules = [Rule(fault) for fault in parse(plan)]
    with _setting:
        active = Faults(rules)
