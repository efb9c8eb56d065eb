"""Which attributes of a group are its own, which are worker methods, and what a missing attribute raises."""

from __future__ import annotations

import functools
import inspect

import group_kit
import pytest
from group_kit import Arm
from msgspec.structs import replace

from rlinf_actors.errors import UsageError
from rlinf_actors.group.class_facts import RESERVED, YIELDING, Method, facts_of, public_methods
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.group import WorkerGroup, yielding
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.worker.worker import Worker


@pytest.mark.parametrize("name", RESERVED)
def test_create_group_refuses_methods_with_names_that_old_scripts_use(name):
    base = type("Base", (Worker,), {name: lambda self: None})
    cls = type("Mine", (base,), {})
    with pytest.raises(UsageError, match=f"Base.{name} clashes with WorkerGroup.{name}.*rename the method"):
        cls.create_group()
    assert issubclass(UsageError, RuntimeError)


@pytest.mark.parametrize("name", YIELDING)
async def test_worker_method_hides_a_newer_name_of_the_group(name):
    cls = type("Mine", (Worker,), {name: lambda self: None})
    cls.create_group()
    world = group_kit.World(1, cls)
    getattr(world.group, name)()
    assert (await world.ranks[0].call()).method == name


@pytest.mark.parametrize("name", YIELDING)
async def test_control_has_each_newer_name_of_the_group(name):
    """With the same parameters, also for a class that has methods of all those names."""
    own = [name for name in YIELDING if name != "control"]
    world = group_kit.World(2, type("Mine", (Arm,), dict.fromkeys(own, lambda self: None)))
    of_group, control = inspect.getattr_static(WorkerGroup, name), world.group.control
    found = getattr(control, name)
    if isinstance(of_group, yielding):
        assert not callable(found)
        assert found == {"control": control, "world_size": 2, "placements": control.placements}[name]
    else:
        theirs = inspect.signature(getattr(WorkerGroup, name)).parameters
        assert [one for one in theirs if one != "self"] == [*inspect.signature(found).parameters]


async def test_view_of_the_control_calls_worker_methods():
    world = group_kit.World(2, type("Mine", (Arm,), {"with_timeout": lambda self: None}))
    world.group.control.with_timeout(5).with_timeout()
    call = await world.ranks[1].call()
    assert (call.method, call.deadline_s) == ("with_timeout", 5)
    with pytest.raises(ValueError, match=r"with_retries\(0\)"):
        world.group.control.with_retries(0)
    address = WorkerAddress("mine", 0).get_child_address(1)
    with pytest.raises(UsageError, match="only workers can be called"):
        world.group.control.from_address(Arm, address)


async def test_names_of_the_group_stay_reachable_by_control(world):
    class Mine(Arm):
        def shutdown(self): ...

        def world_size(self): ...

    mine = group_kit.World(2, Mine)
    assert mine.group.control.world_size == 2
    mine.group.world_size()
    assert (await mine.ranks[1].call()).method == "world_size"
    await mine.group.control.shutdown_async()
    assert mine.stopped == [5.0]
    assert world.group.world_size == 3
    assert type(world.group).world_size.__doc__


def listed(function):
    @functools.wraps(function)
    def run(*args):
        return list(function(*args))

    return run


def test_public_methods_of_all_kinds_are_listed():
    class Kinds(Worker):
        attribute = 3

        @staticmethod
        def static(): ...

        @classmethod
        def of_class(cls): ...

        @property
        def value(self): ...

        @Worker.timer("t")
        def timed(self): ...

        @Worker.timer("t")
        async def timed_stream(self):
            yield 1

        partial = functools.partialmethod(print)

        class Inner: ...

        async def coroutine(self): ...

        async def stream(self):
            yield 1

        def generator(self):
            yield 1

        @Worker.timer("t")
        def timed_generator(self):
            yield 1

        @listed
        def list_of_generator(self):
            yield 1

    methods = public_methods(Kinds)
    assert {name: methods.get(name) for name in vars(Kinds) if not name.startswith("_")} == {
        "attribute": None,
        "static": Method(),
        "of_class": Method(),
        "value": None,
        "timed": Method(),
        "timed_stream": Method(streams=True),
        "partial": Method(),
        "Inner": None,
        "coroutine": Method(),
        "stream": Method(streams=True),
        "generator": Method(streams=True),
        "timed_generator": Method(streams=True),
        "list_of_generator": Method(),
    }
    assert {"get_name", "log_info", "acquire_free_port", "pop_execution_times"} <= set(methods)
    assert not {"create_group", "timer", "worker_timer"} & set(methods)


def test_decorators_that_mark_methods_work_in_any_order():
    class Marked(Worker):
        @Worker.idempotent
        @Worker.timer("t")
        def above(self): ...

        @Worker.timer("t")
        @Worker.idempotent
        def below(self): ...

        @Worker.idempotent
        async def coroutine(self): ...

        @Worker.timer()
        @Worker.idempotent
        async def stream(self):
            yield 1

        @Worker.idempotent
        @staticmethod
        def static(): ...

        @classmethod
        @Worker.idempotent
        def of_class(cls): ...

        @Worker.concurrent(threads=2)
        def beside(self): ...

        @Worker.idempotent
        @Worker.concurrent()
        def both(self): ...

        def plain(self): ...

    class Overridden(Marked):
        def above(self): ...

        def concurrent(self): ...

    methods = public_methods(Marked)
    assert {name: methods[name] for name in vars(Marked) if not name.startswith("_")} == {
        "above": Method(idempotent=True),
        "below": Method(idempotent=True),
        "coroutine": Method(idempotent=True),
        "stream": Method(streams=True, idempotent=True),
        "static": Method(idempotent=True),
        "of_class": Method(idempotent=True),
        "beside": Method(concurrent=2),
        "both": Method(idempotent=True, concurrent=1),
        "plain": Method(),
    }
    assert not {"idempotent", "concurrent"} & methods.keys()
    assert public_methods(Overridden)["above"] == Method()
    assert public_methods(Overridden)["below"] == Method(idempotent=True)
    assert public_methods(Overridden)["concurrent"] == Method()
    assert Marked.static() is None
    assert Marked.of_class() is None


@pytest.mark.parametrize("threads", [0, -1, True, "2", 1.5])
def test_invalid_number_of_threads_is_refused(threads):
    with pytest.raises(UsageError, match="takes a whole number, 1 or more"):
        Worker.concurrent(threads=threads)


def test_marking_anything_but_a_method_is_refused():
    with pytest.raises(UsageError, match=r"write @Worker.concurrent\(\)"):
        Worker.concurrent(lambda self: None)
    with pytest.raises(UsageError, match="marks methods, and <property"):
        Worker.idempotent(property(lambda self: None))
    with pytest.raises(UsageError, match="marks methods"):
        Worker.concurrent()(3)


@pytest.mark.parametrize("kind", ["coroutine", "stream"])
def test_an_async_method_gets_no_thread_of_its_own(kind):
    class Mine(Worker):
        if kind == "coroutine":

            @Worker.timer()
            @Worker.concurrent()
            async def health(self): ...

        else:

            @Worker.concurrent()
            async def health(self):
                yield 1

    with pytest.raises(UsageError, match=r"Mine.health is an async def marked @Worker.concurrent\(\).*a plain def"):
        Mine.create_group()


@pytest.mark.parametrize("name", ["_close", "_private", "on_lease_lost", "on_restart"])
def test_concurrent_is_refused_on_methods_that_calls_cannot_reach(name):
    cls = type("Mine", (Worker,), {name: Worker.concurrent()(lambda self: None)})
    with pytest.raises(UsageError, match=rf"Mine.{name} is marked .* not called from outside"):
        cls.create_group()


async def test_call_of_a_private_method_is_an_error_that_says_so(world):
    with pytest.raises(ValueError, match=r"Arm\._secret\(\) is private"):
        world.group._secret()
    with pytest.raises(ValueError, match="private"):
        world.group.execute_on(0)._secret()


async def test_missing_attribute_error_lists_the_public_methods(world):
    with pytest.raises(AttributeError, match="Arm has no public method 'mvoe'; it has move, stop, watch"):
        world.group.mvoe()
    assert not hasattr(world.group, "_nothing")
    assert not hasattr(world.group, "__array__")


async def test_completion_shows_the_workers_methods(world):
    assert {"move", "stop", "watch", "execute_on", "shutdown", "log_info"} <= set(dir(world.group))
    assert "move" in dir(world.group.execute_on(0))


async def test_group_shows_its_name_class_size_and_workers(world):
    group = world.group
    assert (group.worker_group_name, group.worker_cls_name, group.world_size) == ("arms", "Arm", 3)
    assert repr(group) == "<WorkerGroup 'arms' of 3 Arm>"
    assert repr(group.move) == "<method move() of group 'arms', ranks [0, 1, 2]>"
    infos = group.worker_info_list
    assert [info.rank for info in infos] == [0, 1, 2]
    infos[2].worker.move(1.5)
    assert (await world.ranks[2].call()).method == "move"
    assert world.ranks[2].args == [((1.5,), {})]
    assert world.ranks[0].calls == []
    assert infos[1].info.node_ip == "10.0.0.1"


class Kinds(Arm):
    """Has a method of every kind."""

    def move(self, x: float = 0.0) -> float:
        return x + 1

    def _private(self) -> None: ...

    @Worker.timer("t")
    def timed(self): ...

    @staticmethod
    def static(): ...

    @classmethod
    def of_class(cls): ...

    partial = functools.partialmethod(move, 3)
    alias = Arm.stop


class TestTypedCalls:
    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (Kinds.move, "move"),
            (Arm.move, "move"),
            (Kinds.stop, "stop"),
            (Kinds.alias, "stop"),
            (Kinds.timed, "timed"),
            (Kinds.static, "static"),
            (Kinds.of_class, "of_class"),
            (Kinds.partial, "partial"),
            (Worker.get_name, "get_name"),
        ],
    )
    async def test_functions_of_the_class_and_its_bases_can_be_called(self, function, name):
        world = group_kit.World(2, Kinds)
        for group in (world.group, world.group.execute_on(0), world.group.control):
            group.call(function)
            group.method(function)()
        assert [call.method for call in await world.ranks[0].until(6)] == [name] * 6
        assert len(await world.ranks[1].until(4)) == 4

    async def test_arguments_of_typed_calls_reach_the_workers(self, world):
        world.group.call(Arm.move, x=3.0)
        world.group.with_timeout(5).call(Arm.move, 4.0)
        assert (await world.ranks[1].call(1)).deadline_s == 5
        assert world.ranks[1].args == [((), {"x": 3.0}), ((4.0,), {})]

    async def test_function_of_an_unrelated_class_is_refused(self, world):
        with pytest.raises(
            UsageError, match=r"Kinds\.move is no method of Arm, the class of group 'arms': .*Arm\.move"
        ):
            world.group.call(Kinds.move, 1.0)

    @pytest.mark.parametrize("given", [print, "move", lambda arm: None, group_kit.FakeRank.say, [], None])
    async def test_objects_that_are_no_method_of_the_class_are_refused(self, world, given):
        with pytest.raises(UsageError, match="is no method of Arm"):
            world.group.method(given)
        assert all(rank.calls == [] for rank in world.ranks)

    async def test_private_functions_are_refused(self, world):
        for function in (Arm._secret, Worker.on_lease_lost, Worker.create_group):
            with pytest.raises(UsageError, match=r"cannot be called on a group: .* is not public"):
                world.group.call(function)

    async def test_worker_methods_named_like_typed_calls_are_called_first(self):
        class Mine(Worker):
            def call(self, n): ...

            def method(self): ...

            def with_timeout(self): ...

        world = group_kit.World(1, Mine)
        world.group.call(3)
        world.group.method()
        world.group.execute_on(0).with_timeout()
        world.group.control.call(Mine.call, 4)
        world.group.control.method(Mine.method)()
        assert [call.method for call in await world.ranks[0].until(5)] == [
            "call", "method", "with_timeout", "call", "method",
        ]  # fmt: skip
        assert world.ranks[0].args[0] == ((3,), {})

    async def test_replaced_function_is_found(self, world, monkeypatch):
        world.group.call(Arm.stop)
        monkeypatch.setattr(Arm, "move", lambda arm: None)
        world.group.call(Arm.move)
        assert (await world.ranks[0].call(1)).method == "move"

    async def test_handle_without_the_class_calls_by_name(self, world):
        control = GroupControl(world.runtime, world.remote, replace(facts_of(Arm), cls=None))
        control.call(Kinds.move, 1.0)
        assert (await world.ranks[0].call()).method == "move"
        with pytest.raises(UsageError, match="is no method of Arm"):
            control.call(Kinds.timed)
