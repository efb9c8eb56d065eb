"""All interleavings of the steps by which threads take and leave the turn to read (`net.reader_turns`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from rlinf_actors.net.reader_turns import ReaderTurns


@dataclass(eq=False)
class Waiting:
    """A thread that waits for one result. *at* is its next step, as in `Reading.wait`."""

    thread: int
    may_give_up: bool = False
    at: str = "look"
    done: bool = False
    open: bool = False
    to_wake: list[int] = field(default_factory=list)


@dataclass
class World:
    """The threads, their socket (the results in it, by thread), and results that come another way (*others*)."""

    waiting: list[Waiting]
    socket: list[int]
    others: list[int]
    turns: ReaderTurns[Waiting] = field(default_factory=ReaderTurns)
    watched: bool = True
    bell: bool = False
    loop_at: str = "watch"
    to_wake: list[int] = field(default_factory=list)
    other_wakes: list[int] = field(default_factory=list)

    def key(self) -> object:
        turns = self.turns
        number = {id(one): n for n, one in enumerate(self.waiting)}
        reader = None if turns.reader is None else number[id(turns.reader)]
        asleep = tuple(number[id(one)] for one in (*turns._asleep, *turns._interrupted))
        threads = tuple((one.at, one.done, one.open, tuple(one.to_wake)) for one in self.waiting)
        rest = (tuple(self.socket), tuple(self.others), self.watched, self.bell, self.loop_at, tuple(self.to_wake))
        return threads, reader, asleep, turns.loop_reads, rest, tuple(self.other_wakes)

    def carry_out(self) -> None:
        self.watched = self.turns.reader is None
        if self.turns.resumed:
            self.bell, self.turns.resumed = True, False
        if self.turns.given is not None:
            self.turns.given.open, self.turns.given = True, None

    def wake(self, waiter: Waiting) -> None:
        if self.turns.sleeps(waiter):
            waiter.open = True
            self.turns.woken(waiter)
        elif self.turns.reader is waiter:
            self.bell = True

    def receive(self, to_wake: list[int]) -> None:
        self.bell = False
        if self.socket:
            n = self.socket.pop(0)
            self.waiting[n].done = True
            to_wake.append(n)

    # --- the steps that can be done now ---

    def steps(self) -> Iterator[str]:
        for n, one in enumerate(self.waiting):
            inner = [other for other in self.waiting[n + 1 :] if other.thread == one.thread]
            if any(other.at not in ("begin", "over") for other in inner):
                continue  # the thread runs a signal handler
            awake = one.at == "sleep" and one.open
            readable = one.at == "poll" and bool(self.socket or self.bell)
            if one.to_wake or awake or readable or one.at in ("begin", "look", "ask", "leave"):
                yield f"step {n}"
            if one.at in ("poll", "sleep") and one.may_give_up:
                yield f"give-up {n}"
        if self.loop_at != "watch" or (self.watched and (self.socket or self.bell)):
            yield "loop -1"
        if self.others or self.other_wakes:
            yield "other -1"

    def do(self, step: str) -> None:
        what, _, number = step.partition(" ")
        if what == "loop":
            self.loop()
        elif what == "other":
            if self.other_wakes:
                self.wake(self.waiting[self.other_wakes.pop()])
            else:
                n = self.others.pop(0)
                self.waiting[n].done = True
                self.other_wakes.append(n)
        elif what == "give-up":
            self.waiting[int(number)].at = "leave"
        else:
            self.step(self.waiting[int(number)])

    def loop(self) -> None:
        if self.loop_at == "watch":
            if self.turns.loop_begins():
                self.loop_at = "read"
        elif self.to_wake:
            self.wake(self.waiting[self.to_wake.pop()])
        elif self.loop_at == "read":
            self.receive(self.to_wake)
            self.loop_at = "end"
        else:
            self.turns.loop_ends()
            self.carry_out()
            self.loop_at = "watch"

    def step(self, one: Waiting) -> None:
        if one.to_wake:
            self.wake(self.waiting[one.to_wake.pop()])
        elif one.at in ("begin", "look"):
            one.at = "leave" if one.done else "ask"
        elif one.at == "ask":
            if one.done:
                one.at = "leave"
                return
            one.at = "poll" if self.turns.ask(one) else "sleep"
            self.carry_out()
        elif one.at == "poll":
            if self.turns.reader is one:
                self.receive(one.to_wake)
            one.at = "look"
        elif one.at == "sleep":
            one.open = False
            one.at = "look"
        elif one.at == "leave":
            if self.turns.leave_to_nobody(one):
                self.watched = True
            else:
                self.turns.leave(one)
                self.carry_out()
            one.open = False
            one.at = "over"


def explore(world: World) -> int:
    """Try all interleavings. Return the number of different states."""
    seen, todo = {world.key()}, [world]
    while todo:
        world = todo.pop()
        steps = list(world.steps())
        if not steps:
            assert all(one.at == "over" for one in world.waiting), world
            assert not world.socket, world
            assert world.watched, world
            assert world.turns.reader is None, world
        for step in steps:
            after = copy.deepcopy(world)
            after.do(step)
            if after.key() not in seen:
                seen.add(after.key())
                todo.append(after)
    return len(seen)


@pytest.mark.parametrize(
    ("waiting", "socket", "others"),
    [
        ([Waiting(1)], [0], []),
        ([Waiting(1)], [], [0]),
        ([Waiting(1), Waiting(2)], [0, 1], []),
        ([Waiting(1), Waiting(2)], [1, 0], []),
        ([Waiting(1), Waiting(2)], [1], [0]),
        ([Waiting(1), Waiting(2)], [], [1, 0]),
        ([Waiting(1, may_give_up=True), Waiting(2)], [0, 1], []),
        ([Waiting(1, may_give_up=True), Waiting(2, may_give_up=True)], [1], [0]),
        ([Waiting(1), Waiting(2), Waiting(3)], [2, 0], [1]),
        ([Waiting(1), Waiting(1, at="begin")], [0, 1], []),  # a signal handler waits on the thread that waits
        ([Waiting(1), Waiting(1, at="begin"), Waiting(2)], [2, 0], [1]),
    ],
)
def test_no_interleaving_loses_a_wake_up(waiting: list[Waiting], socket: list[int], others: list[int]) -> None:
    assert explore(World(copy.deepcopy(waiting), list(socket), list(others))) > 5


def test_the_model_finds_a_lost_wake_up() -> None:
    class Forgetful(ReaderTurns[Waiting]):
        def _next(self) -> None:
            """Give the turn to nobody: a sleeper then waits for ever if the loop has been told nothing."""

        def leave(self, waiter: Waiting) -> None:
            super().leave(waiter)
            self.reader = self.reader or next(iter(self._asleep), None)

    waiting = [Waiting(1), Waiting(2)]
    with pytest.raises(AssertionError):
        explore(World(waiting, [0, 1], [], turns=Forgetful()))
