"""The stacks of a process: what threads and tasks run, what they wait for, and bounds whatever user code does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest

from rlinf_actors.compat import TaskGroup
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.messaging.blocking_receive import BlockingReceive
from rlinf_actors.runtime.future import AsyncWork, Future, Promise
from rlinf_actors.wire.stack_values import MAX_FRAMES, MAX_STACKS, STACK_BYTES, Wait, WorkerStacks
from rlinf_actors.wire.template_protocol import MAX_PACKET, decode_to_agent, encode
from rlinf_actors.wire.worker_questions import WorkerAnswered
from rlinf_actors.worker.executors import Activity
from rlinf_actors.worker.invocation import own_steps
from rlinf_actors.worker.stacks import worker_stacks


def now(id: str = "w") -> WorkerStacks:
    return worker_stacks(id, Activity("step", 0.0, 2), None)


def from_a_thread() -> WorkerStacks:
    """The stacks as another thread takes them, as the I/O thread of a worker does."""
    found: list[WorkerStacks] = []
    taker = threading.Thread(target=lambda: found.append(now()))
    taker.start()
    taker.join()
    return found[0]


@contextlib.contextmanager
def waiting(
    future: Future, wait: Callable[[], object], *, name: str = "waits", kind: type = threading.Thread
) -> Iterator:
    """Run *wait* on a thread, which waits for *future*, until the block ends."""
    begun = threading.Event()
    add = future._on_done

    def on_done(callback: Callable[[], object]) -> None:
        add(callback)
        begun.set()

    future._on_done = on_done
    thread = kind(target=wait, name=name)
    thread.start()
    assert begun.wait(10)
    yield
    future._finish(None)
    thread.join()


def wait_of(shown: WorkerStacks, where: str = "waits") -> Wait:
    """The wait of one thread or task; threads that other tests have left may wait too."""
    (wait,) = [wait for wait in shown.waits if wait.where == where]
    return wait


def functions(shown: WorkerStacks, name: str) -> list[str]:
    (stack,) = [stack for stack in shown.stacks if stack.name == name]
    return [frame.function for frame in stack.frames]


def test_the_main_thread_is_first_and_the_calling_thread_is_left_out():
    shown = from_a_thread()
    assert shown.stacks[0].name == "MainThread"
    assert any(frame.function == "from_a_thread" for frame in shown.stacks[0].frames)
    assert not any("worker_stacks" in frame.function for stack in shown.stacks for frame in stack.frames)
    assert (shown.id, shown.method, shown.queued) == ("w", "step", 2)
    assert shown.call_s > 0


def test_frames_of_a_thread_that_leaves_a_coroutine_meanwhile_are_taken_again(monkeypatch):
    """The frame of a coroutine that was left leads to no caller: not to the thread's event loop either."""
    left = gets(asyncio.sleep(0))
    left.send(None)
    main, take = threading.main_thread().ident, sys._current_frames
    taken = [{main: left.cr_frame}, {main: left.cr_frame}]
    monkeypatch.setattr(sys, "_current_frames", lambda: taken.pop() if taken else take())
    shown = from_a_thread()
    assert any(frame.function == "from_a_thread" for frame in shown.stacks[0].frames)
    left.close()


def test_a_thread_that_waits_says_for_what_and_for_whom():
    future = BlockingReceive("recv() from env:1", ("env:1", ""))
    with waiting(future, future.wait):
        shown = now()
    wait = wait_of(shown)
    assert (wait.what, wait.on, wait.blocks, wait.limit_s) == ("recv() from env:1", ["env:1"], False, 0.0)
    assert 0 <= wait.seconds < 100
    names = [name.rpartition(".")[2] for name in functions(shown, "waits")]
    assert names[names.index("_block_until_done") - 1] == "wait"  # it may still be on its way into the kernel


def test_a_wait_with_a_time_limit_says_the_limit():
    work: AsyncWork = AsyncWork("send() to env:2")
    with waiting(work, lambda: work.wait(500.0)):
        wait = wait_of(now())
    assert (wait.on, wait.limit_s) == (["env:2"], 500.0)


def test_a_wait_for_what_comes_after_another_work_is_one_for_that_work():
    source = BlockingReceive("recv() from env:3", ("env:3", ""))
    mapped = AsyncWork.made_of(source, lambda message: message, "all parts")
    with waiting(mapped, mapped.wait):
        wait = wait_of(now())
    assert (wait.what, wait.on) == ("recv() from env:3", ["env:3"])
    source._finish(None)


def test_a_call_waits_for_the_ranks_that_have_not_answered():
    peers = [SimpleNamespace(name=f"actor:{rank}", rank=rank) for rank in range(3)]
    call = WorkerGroupFuncResult(SimpleNamespace(serving_thread=0), "step", peers)
    call._answers[1] = ValueError()

    def wait() -> None:
        with contextlib.suppress(KeyError):  # the other answers never come
            call.wait()

    with waiting(call, wait):
        found = wait_of(now())
    assert (found.what, found.on) == ("step() of actor:0, 2", ["actor:0", "actor:2"])


async def test_tasks_are_shown_with_their_await_chains_and_waits():
    promise: Promise[None] = Promise("get() from channel 'rollouts'")

    async def inner() -> None:
        await promise

    async def outer() -> None:
        await own_steps(inner(), "step()")

    async def idle() -> None:
        await asyncio.get_running_loop().create_future()

    tasks = [asyncio.create_task(outer(), name="first")]
    tasks += [asyncio.create_task(idle(), name=f"idle-{n}") for n in range(3)]
    await asyncio.sleep(0)
    shown = await asyncio.to_thread(now)
    assert [name.rpartition(".")[2] for name in functions(shown, "first")] == [
        "outer", "own_steps", "inner", "__await__",
    ]  # fmt: skip
    wait = wait_of(shown, "first")
    assert (wait.what, wait.blocks) == ("get() from channel 'rollouts'", False)
    (alike,) = [stack for stack in shown.stacks if stack.name.startswith("idle-")]
    assert (alike.count, alike.is_task, alike.depth, alike.awaits) == (3, True, 0, "a future")
    (first,) = [stack for stack in shown.stacks if stack.name == "first"]
    assert first.awaits == "get() from channel 'rollouts'"
    promise.resolve(None)
    await tasks[0]
    for task in tasks[1:]:
        task.cancel()


async def gathers(*awaited: Awaitable[object]) -> None:
    await asyncio.gather(*awaited)


async def waits_for(*awaited: asyncio.Task[None]) -> None:
    await asyncio.wait(awaited)


async def shields(*awaited: asyncio.Task[None]) -> None:
    await asyncio.shield(awaited[0])


async def waits_with_a_limit(*awaited: asyncio.Task[None]) -> None:
    await asyncio.wait_for(awaited[0], 1000)


async def groups(*awaited: asyncio.Task[None]) -> None:
    async with TaskGroup() as tasks:
        for task in awaited:
            tasks.create_task(gets(task), name="in-group")


async def gets(task: Awaitable[object]) -> None:
    await task


def trees(shown: WorkerStacks, *names: str) -> list[tuple[int, str, str]]:
    """The trees of tasks that begin with one of these names: depth, name and what is awaited of each."""
    found, inside = [], False
    for stack in shown.stacks:
        inside = stack.is_task and ((stack.depth > 0 and inside) or stack.name in names)
        if inside:
            found.append((stack.depth, stack.name, stack.awaits))
    return found


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (gets, "a task"),
        (gathers, "gather()"),
        (waits_for, "wait()"),
        (shields, "shield()"),
        (waits_with_a_limit, "wait_for()" if sys.version_info < (3, 12) else "a task"),
    ],
)
async def test_a_task_that_another_awaits_is_beneath_it(how, said):
    inner = asyncio.create_task(gets(asyncio.get_running_loop().create_future()), name="inner")
    middle = asyncio.create_task(how(inner), name="middle")
    outer = asyncio.create_task(gets(middle), name="outer")
    for _ in range(3):
        await asyncio.sleep(0)
    shown = await asyncio.to_thread(now)
    assert trees(shown, "outer", "inner") == [(0, "outer", "a task"), (1, "middle", said), (2, "inner", "a future")]
    for task in (outer, middle, inner):
        task.cancel()
    await asyncio.wait([outer, middle, inner])


async def test_several_tasks_that_one_awaits_are_merged_or_named_and_those_that_ended_are_counted():
    never = asyncio.get_running_loop().create_future()
    named = asyncio.create_task(gets(never), name="named")
    done = asyncio.create_task(asyncio.sleep(0))
    tasks = [asyncio.create_task(gathers(done, named, gets(never), gets(never)), name="all")]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(gets(named), name="too"))
    tasks.append(asyncio.create_task(groups(named), name="group"))
    for _ in range(3):
        await asyncio.sleep(0)
    shown = await asyncio.to_thread(now)
    first, named_too, two_more = [stack for stack in shown.stacks if stack.is_task][:3]
    assert (first.name, first.awaits) == ("all", "gather() of 4, 1 done")
    assert (named_too.name, named_too.count, named_too.depth) == ("named", 1, 1)
    assert (two_more.awaits, two_more.count, two_more.depth) == ("a future", 2, 1)
    elsewhere = "a task: named, shown elsewhere"
    assert trees(shown, "too") == [(0, "too", elsewhere)]
    assert trees(shown, "group") == [(0, "group", "TaskGroup"), (1, "in-group", elsewhere)]
    never.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_tasks_that_await_one_another_are_a_ring():
    ring: dict[str, asyncio.Task[None]] = {}

    async def awaits(other: str) -> None:
        await asyncio.sleep(0)
        await asyncio.wait([ring[other]])  # else CPython could not cancel them

    for name, other in (("a", "b"), ("b", "a")):
        ring[name] = asyncio.create_task(awaits(other), name=name)
    ring["c"] = asyncio.create_task(awaits("a"), name="c")
    for _ in range(3):
        await asyncio.sleep(0)
    shown = await asyncio.to_thread(now)
    assert trees(shown, "a", "b", "c") == [
        (0, "c", "wait()"), (1, "a", "wait()"), (2, "b", "wait(): a above, which waits for this one"),
    ]  # fmt: skip
    ring["a"].cancel()
    await asyncio.wait(ring.values())


async def test_what_a_running_task_awaits_is_not_read():
    """CPython up to 3.12 may crash in that, while the task's coroutines are being entered."""
    runs, go_on, shown = threading.Event(), threading.Event(), []

    async def inner() -> None:
        runs.set()
        go_on.wait()

    async def outer() -> None:
        await inner()

    def look() -> None:
        runs.wait()
        try:
            shown.append(now())
        finally:
            go_on.set()

    thread = threading.Thread(target=look)
    thread.start()
    await asyncio.create_task(outer(), name="runs")
    thread.join()
    assert [name.rpartition(".")[2] for name in functions(shown[0], "runs")] == ["outer"]


class Hostile(threading.Thread):
    """A thread whose names and texts run code of the user."""

    def __repr__(self) -> str:
        raise AssertionError("code of the user ran")

    __str__ = __hash__ = __repr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("code of the user ran")

    @property
    def name(self) -> str:
        raise AssertionError("code of the user ran")

    @name.setter
    def name(self, value: str) -> None:
        raise AssertionError("code of the user ran")


def test_no_code_of_the_user_runs():
    gate = threading.Event()

    class Local:
        def __repr__(self) -> str:
            raise AssertionError("code of the user ran")

    def run(local: object) -> None:
        gate.wait()

    thread = threading.Thread(target=run, args=(Local(),), name="mine")
    thread.start()
    plain = thread.__class__
    thread.__class__ = Hostile
    shown = now()
    thread.__class__ = plain
    gate.set()
    thread.join()
    assert any(stack.name == "mine" for stack in shown.stacks)


@pytest.mark.parametrize("name", ["\ud800 \x1b[2J", "x" * 100_000, "😀" * 1000])
def test_any_name_of_a_thread_can_be_sent(name):
    future: Future[None] = Future(name)
    with waiting(future, future.wait, name=name):
        packet = WorkerAnswered("w", 1, now())
    assert decode_to_agent(encode(packet)) == packet


def test_a_deep_stack_is_shown_with_its_ends():
    begun, gate = threading.Event(), threading.Event()

    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        else:
            begun.set()
            gate.wait()

    thread = threading.Thread(target=descend, args=(300,), name="deep")
    thread.start()
    assert begun.wait(10)
    shown = now()
    gate.set()
    thread.join()
    (stack,) = [stack for stack in shown.stacks if stack.name == "deep"]
    assert len(stack.frames) == MAX_FRAMES
    (gap,) = [number for number, frame in enumerate(stack.frames) if not frame.file]
    assert "frames are left out" in stack.frames[gap].function
    assert stack.frames[0].function.endswith("_bootstrap")
    assert any(frame.function.endswith("descend") for frame in stack.frames[gap:])


async def test_the_stacks_of_many_tasks_fit_into_a_packet():
    functions: list = []
    for n in range(400):  # each of another code
        scope: dict = {}
        exec(f"async def {'f' * 200}{n}(future):\n    await future\n", scope)
        functions.append(scope[f"{'f' * 200}{n}"])
    never = asyncio.get_running_loop().create_future()
    tasks = [asyncio.create_task(function(never)) for function in functions]
    await asyncio.sleep(0)
    shown, threads = await asyncio.to_thread(lambda: (now(), len(sys._current_frames()) - 1))
    data = encode(WorkerAnswered("w", 1, shown))
    assert len(data) < MAX_PACKET >> 4  # what a template reads
    assert len(msgspec.msgpack.encode(shown.stacks)) > STACK_BYTES // 2
    assert len(shown.stacks) <= MAX_STACKS
    assert shown.cut + sum(stack.count for stack in shown.stacks) == len(asyncio.all_tasks()) + threads
    never.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
