"""Classes by value: a class that lives in a process keeps its state when an instance arrives."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import gc
import threading
from typing import ClassVar

import pytest

from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts


def sent(value):
    return [bytes(part) for part in payload.encode(value)]


def received(parts):
    assert parts[0][:1] == b"C", "by value"
    return payload.decode(AuthenticatedParts(parts))


def plain():
    class Env:
        seen = 0
        cache: ClassVar = {}

        def step(self):
            type(self).seen += 1
            return self.seen

    return Env()


def subclass():
    class Base:
        seen = 0
        cache: ClassVar = {}

    class Env(Base):
        seen = 0

    return Env()


def dataclass():
    @dataclasses.dataclass
    class Env:
        step: int = 1
        seen: ClassVar[int] = 0
        cache: ClassVar[dict] = {}

    return Env(3)


def enumeration():
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    Color.seen, Color.cache = 0, {}
    return Color.RED


def abstract():
    class Env(abc.ABC):
        seen = 0
        cache: ClassVar = {}

        @abc.abstractmethod
        def step(self): ...

    class Walk(Env):
        def step(self): ...

    return Walk()


def exception():
    class Failed(Exception):
        seen = 0
        cache: ClassVar = {}

    return Failed("x")


KINDS = [plain, subclass, dataclass, enumeration, abstract, exception]


def elsewhere(make):
    """The parts of an object whose class no longer lives here: as in another process."""
    parts = sent(make())
    gc.collect()
    return parts


@pytest.mark.parametrize("make", KINDS)
def test_class_that_was_received_keeps_its_state(make):
    parts = elsewhere(make)
    cls = type(received(parts))
    assert cls.seen == 0
    cls.seen, cls.later = 5, "set here"
    cls.cache["key"] = "found"
    again = type(received(parts))
    assert again is cls
    assert (cls.seen, cls.cache, cls.later) == (5, {"key": "found"}, "set here")


@pytest.mark.parametrize("make", KINDS)
def test_class_of_the_sender_keeps_its_state_when_an_instance_comes_back(make):
    value = make()
    cls, parts = type(value), sent(value)
    cls.seen, cls.later = 5, "set here"
    cls.cache["key"] = "found"
    assert type(received(parts)) is cls
    assert (cls.seen, cls.cache, cls.later) == (5, {"key": "found"}, "set here")


@pytest.mark.parametrize("make", KINDS)
def test_received_class_keeps_its_state_while_it_has_no_instance(make):
    parts = elsewhere(make)
    type(received(parts)).seen = 5
    gc.collect()
    assert type(received(parts)).seen == 5


def test_what_the_sender_changes_in_its_class_does_not_follow():
    value = plain()
    first = sent(value)
    type(value).seen = 7
    second = sent(value)
    del value
    gc.collect()
    assert [type(received(parts)).seen for parts in (first, second, first)] == [0, 0, 0]


def test_base_keeps_its_state_when_an_instance_of_a_new_subclass_arrives():
    class Base:
        seen = 0

    Base.seen, first = 1, sent(Base())

    class Derived(Base):
        pass

    second = sent(Derived())
    del Base, Derived
    gc.collect()
    base = type(received(first))
    base.seen = 5
    derived = type(received(second))
    assert derived.__base__ is base
    assert derived.seen == 5


def test_class_is_registered_once_where_its_instances_arrive():
    class Base:
        registry: ClassVar = {}
        made: ClassVar = []

        def __init_subclass__(cls):
            cls.registry[cls.__name__] = cls
            cls.made.append(cls)

    class Env(Base):
        def step(self):
            return "stepped"

    parts = sent(Env())
    for _ in range(2):
        assert Base.registry == {"Env": Env}
        assert type(received(parts)) is Env
        assert Base.made == [Env]
    del Base, Env
    gc.collect()
    for _ in range(3):
        env = received(parts)
        assert env.registry["Env"] is type(env)
        assert env.registry["Env"]().step() == "stepped"


def test_class_that_is_defined_again_replaces_the_former():
    def define(factor):
        class Env:
            seen = 0
            scale = factor

            def step(self):
                return self.scale * 2

        return Env()

    old, new = (elsewhere(lambda factor=factor: define(factor)) for factor in (1, 10))
    former = received(old)
    type(former).seen = 5
    later = received(new)
    assert (later.step(), type(later).seen) == (20, 0)
    assert (former.step(), type(former).seen) == (2, 5)
    assert len({cls for cls in payload._received.values() if cls in (type(former), type(later))}) == 1, "no leak"


gates: collections.deque[tuple[threading.Event, threading.Event]] = collections.deque()


def gate():
    """A value that takes its time to unpickle, the first time."""
    if gates:
        reached, opened = gates.popleft()
        reached.set()
        opened.wait(30)
    return "passed"


class Gate:
    def __reduce__(self):
        return gate, ()


def test_class_that_two_threads_receive_at_once_is_whole_and_written_once():
    def make():
        class Env:
            passed = Gate()
            seen = 0

            def step(self):
                type(self).seen += 1
                return self.passed

        return Env()

    parts = elsewhere(make)
    reached, opened = threading.Event(), threading.Event()
    gates.append((reached, opened))
    slow: list = []
    thread = threading.Thread(target=lambda: slow.append(received(parts)))
    thread.start()
    assert reached.wait(30)
    env = received(parts)
    assert (env.step(), env.step()) == ("passed", "passed")
    opened.set()
    thread.join()
    assert type(slow[0]) is type(env)
    assert env.seen == 2


def test_class_whose_attributes_could_not_be_written_is_written_later():
    def make():
        class Meta(type):
            fails = True

            def __setattr__(cls, name, value):
                if name == "scale" and Meta.fails:
                    Meta.fails = False
                    raise ValueError("not now")
                super().__setattr__(name, value)

        class Env(metaclass=Meta):
            scale = 3

        return Env()

    parts = elsewhere(make)
    with pytest.raises(ValueError, match="not now"):
        received(parts)
    assert received(parts).scale == 3
