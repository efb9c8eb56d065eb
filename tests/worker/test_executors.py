"""Where calls run, in which order, and how they end early."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import pace
import pytest
import worker_kit

from rlinf_actors.errors import CallTimeoutError, SerializationError, UsageError, WorkerError
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker.executors import BesideExecutor, LoopExecutor, SerialExecutor, ThreadsExecutor, uses_event_loop
from rlinf_actors.worker.invocation import Invocation
from rlinf_actors.worker.worker import Worker


class Plain:
    """Methods that block until they are let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.ran: list[object] = []
        self.made = 0
        self.closed = threading.Event()
        self.pause, self.paused = threading.Event(), threading.Event()
        self.pause.set()

    def note(self, what: object) -> object:
        self.ran.append(what)
        return what

    def where(self) -> str:
        return threading.current_thread().name

    def block(self) -> str:
        self.entered.release()
        assert self.go.wait(10)
        return threading.current_thread().name

    def wait_here(self) -> str:
        return self.block()

    def bad(self) -> None:
        raise ValueError("bad")

    def exits(self) -> None:
        raise SystemExit(3)

    def interrupts(self) -> None:
        raise KeyboardInterrupt

    def unpicklable(self) -> object:
        return threading.Lock()

    def exits_when_pickled(self) -> object:
        class Exits:
            def __reduce__(self):
                raise SystemExit(5)

        return Exits()

    def generate(self, n: int):
        """Counts, and notes what its steps run on."""
        try:
            for k in range(n):
                self.made = k + 1
                self.ran.append(threading.current_thread().name)
                if not self.pause.is_set():
                    self.paused.set()
                    assert self.pause.wait(10)
                yield k
            return "dropped"
        finally:
            self.ran.append(f"closed on {threading.current_thread().name}")
            self.closed.set()

    def generates_and_breaks(self):
        yield 1
        raise ValueError("dry")

    def generates_what_cannot_travel(self):
        try:
            yield threading.Lock()
        finally:
            self.closed.set()

    def breaks_when_closed(self):
        try:
            yield 1
            yield 2
        finally:
            self.closed.set()
            raise ValueError("cannot be closed")

    def returns_a_generator(self):
        return (n for n in range(3))

    def returns_an_async_generator(self):
        async def count():
            yield 1

        return count()

    def _private(self) -> None: ...

    def _close(self) -> str:
        return "closed"

    attribute = 3


class Loopy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.events: dict[str, asyncio.Event] = {}
        self.started = threading.Semaphore(0)
        self.cancelled = threading.Event()

    async def meet(self, name: str) -> str:
        self.ran.append(name)
        self.started.release()
        await self.events.setdefault(name, asyncio.Event()).wait()
        return name

    async def release(self, name: str) -> None:
        self.events.setdefault(name, asyncio.Event()).set()

    async def wait_to_be_cancelled(self) -> None:
        self.started.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def raises_cancelled(self) -> None:
        raise asyncio.CancelledError("the user's own")

    async def coroutine_exits(self) -> None:
        raise SystemExit(4)

    async def count(self, n: int):
        try:
            for k in range(n):
                self.made = k + 1
                yield k
        finally:
            self.closed.set()

    async def breaks(self):
        yield 1
        raise ValueError("dry")

    async def same_loop(self) -> bool:
        return asyncio.get_running_loop() is self.loop

    def remember_loop(self) -> str:
        self.loop = asyncio.get_running_loop()
        return threading.current_thread().name


@pytest.fixture
def serial(rlinf_leak_check):
    served = worker_kit.Served(SerialExecutor(), Plain())
    served.plain = served.thread._args[0]
    yield served
    served.plain.go.set()
    served.close()


@pytest.fixture
def loopy(rlinf_leak_check):
    instance = Loopy()
    served = worker_kit.Served(LoopExecutor(), instance)
    served.plain = instance
    yield served
    instance.go.set()
    served.close()


class TestSerial:
    def test_in_order_on_the_main_thread(self, serial):
        calls = [serial.call("note", n) for n in range(100)]
        assert [serial.answers.value(call) for call in calls] == list(range(100))
        assert serial.plain.ran == list(range(100))
        assert serial.answers.order() == calls
        assert serial.run("where") == "main-of-the-worker"

    def test_one_at_a_time(self, serial):
        first, second = serial.call("block"), serial.call("note", "after")
        assert serial.plain.entered.acquire(timeout=10)
        assert serial.executor.waiting()
        assert serial.answers.all == []
        serial.plain.go.set()
        serial.answers.value(second)
        assert serial.answers.order() == [first, second]
        assert not serial.executor.waiting()

    def test_what_runs_since_when_and_what_waits_is_known(self, serial):
        before = time.perf_counter()
        serial.call("block")
        serial.call("note", "after")
        assert serial.plain.entered.acquire(timeout=10)
        method, since, waiting = serial.executor.activity()
        assert (method, waiting) == ("block", 1)
        assert before <= since <= time.perf_counter()
        serial.plain.go.set()

    def test_errors_are_answers_and_the_worker_goes_on(self, serial):
        with pytest.raises(ValueError, match="bad"):
            serial.run("bad")
        for method in ("exits", "interrupts"):
            with pytest.raises(WorkerError):
                serial.run(method)
        with pytest.raises(SerializationError, match=r"the result of unpicklable\(\)"):
            serial.run("unpicklable")
        assert serial.run("note", 1) == 1

    def test_a_result_that_exits_when_it_is_pickled_is_the_calls_error(self, serial):
        """A thread that ended by it would answer no later call."""
        with pytest.raises(WorkerError, match="SystemExit: 5"):
            serial.run("exits_when_pickled")
        assert serial.run("note", 1) == 1

    def test_names_that_cannot_be_called(self, serial):
        for method, said in (("_private", "is private"), ("nothing", "has no method"), ("attribute", "has no method")):
            with pytest.raises(UsageError, match=said):
                serial.run(method)
        assert serial.run("_close") == "closed"

    def test_wrong_arguments_are_the_callers_type_error(self, serial):
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            serial.run("note", 1, 2)

    def test_a_queued_call_that_was_cancelled_is_never_run(self, serial):
        serial.call("block")
        assert serial.plain.entered.acquire(timeout=10)
        queued, after = serial.call("note", "cancelled"), serial.call("note", "kept")
        serial.invocation(queued).cancel()
        serial.plain.go.set()
        serial.answers.value(after)
        assert serial.plain.ran == ["kept"]
        assert queued not in serial.answers.order()

    def test_a_call_whose_time_is_over_is_not_started(self, serial):
        serial.call("block")
        assert serial.plain.entered.acquire(timeout=10)
        late = serial.call("note", "late", deadline_s=1e-9)
        in_time = serial.call("note", "in time", deadline_s=1000)
        serial.plain.go.set()
        assert serial.answers.value(in_time) == "in time"
        with pytest.raises(CallTimeoutError, match=r"note\(\) was not started"):
            serial.answers.value(late)
        assert serial.plain.ran == ["in time"]

    def test_how_long_it_ran_goes_along(self, serial):
        call = serial.call("note", 1)
        serial.answers.value(call)
        assert serial.answers.all[0][1].seconds >= 0

    def test_arguments_are_freed_when_the_call_is_done(self, serial):
        call = serial.call("note", 1)
        serial.answers.value(call)
        assert not serial.invocation(call).parts


class TestThreads:
    def test_as_many_at_once_as_there_are_threads(self, rlinf_leak_check, monkeypatch):
        monkeypatch.setattr(threading, "excepthook", lambda _: None)  # how the kit ends threads
        plain = Plain()
        served = worker_kit.Served(ThreadsExecutor(3, lambda: None), plain)
        calls = [served.call("block") for _ in range(3)]
        for _ in calls:
            assert plain.entered.acquire(timeout=10)
        fourth = served.call("note", "waits")
        first = min(served.invocation(call).began for call in calls)
        assert served.executor.activity() == ("block", first, 1)
        assert plain.ran == []
        plain.go.set()
        assert served.answers.value(fourth) == "waits"
        names = {served.answers.value(call) for call in calls}
        assert names == {"main-of-the-worker", "worker-call-1", "worker-call-2"}
        served.close(threads=3)


class TestLoop:
    def test_everything_runs_on_one_loop_of_the_main_thread(self, loopy):
        assert loopy.run("remember_loop") == "main-of-the-worker"
        assert loopy.run("same_loop") is True
        assert loopy.run("where") == "main-of-the-worker"

    def test_coroutines_overlap_and_start_in_order(self, loopy):
        first, second = loopy.call("meet", "a"), loopy.call("meet", "b")
        loopy.run("note", "both have begun")
        assert loopy.plain.ran.pop() == "both have begun"
        assert loopy.executor.activity() == ("meet", loopy.invocation(first).began, 0)
        loopy.call("release", "b")
        assert loopy.answers.value(second) == "b"
        loopy.call("release", "a")
        assert loopy.answers.value(first) == "a"
        assert loopy.plain.ran == ["a", "b"]

    def test_plain_methods_keep_their_place_in_the_order(self, loopy):
        calls = [loopy.call("note", n) for n in range(50)]
        loopy.answers.value(calls[-1])
        assert loopy.plain.ran == list(range(50))

    def test_errors_are_answers(self, loopy):
        with pytest.raises(ValueError, match="bad"):
            loopy.run("bad")
        with pytest.raises(WorkerError, match="CancelledError: the user's own"):
            loopy.run("raises_cancelled")
        with pytest.raises(WorkerError, match="SystemExit"):
            loopy.run("coroutine_exits")
        assert loopy.run("note", 1) == 1

    def test_cancelling_interrupts_a_coroutine_where_it_awaits(self, loopy):
        call = loopy.call("wait_to_be_cancelled")
        assert loopy.plain.started.acquire(timeout=10)
        loopy.invocation(call).cancel()
        assert loopy.plain.cancelled.wait(10)
        assert loopy.run("note", "lives on") == "lives on"

    def test_cancelling_before_it_starts(self, loopy):
        blocking = loopy.call("block")
        assert loopy.plain.entered.acquire(timeout=10)
        queued = loopy.call("meet", "never")
        loopy.invocation(queued).cancel()
        loopy.plain.go.set()
        loopy.answers.value(blocking)
        assert loopy.run("note", 1) == 1
        assert "never" not in loopy.plain.ran

    def test_a_limit_on_coroutines(self, rlinf_leak_check):
        instance = Loopy()
        served = worker_kit.Served(LoopExecutor(2), instance)
        calls = [served.call("meet", name) for name in "abc"]
        for _ in range(2):
            assert instance.started.acquire(timeout=10)
        assert instance.ran == ["a", "b"]
        instance_loop = served.executor._loop
        instance_loop.call_soon_threadsafe(lambda: instance.events["a"].set())
        assert served.answers.value(calls[0]) == "a"
        assert instance.started.acquire(timeout=10)
        assert instance.ran == ["a", "b", "c"]
        served.close()

    def test_a_constructor_may_make_tasks(self, rlinf_leak_check):
        executor = LoopExecutor()

        class Makes:
            def __init__(self):
                self.loop = asyncio.get_running_loop()
                self.task = asyncio.create_task(self.work())

            async def work(self):
                return 7

            async def result(self):
                return await self.task

        instance = executor.begin(Makes)
        served = worker_kit.Served(executor, instance)
        assert served.run("result") == 7
        served.close()


class TestStreams:
    def test_items_then_the_end(self, loopy):
        call = loopy.call("count", 3, window=16)
        assert loopy.answers.value(call) is None
        assert loopy.answers.items(call) == [0, 1, 2]

    def test_never_more_than_the_window_ahead(self, loopy):
        call = loopy.call("count", 1000, window=4)
        loopy.answers.until(4)
        assert loopy.run("note", "a turn of the loop") is not None
        assert len(loopy.answers.items(call)) == 4
        assert loopy.plain.made == 5  # made, and kept until there is room
        for taken, expected in ((1, 5), (3, 8)):
            loopy.invocation(call).credit(taken)
            loopy.answers.until(expected + 1)
            loopy.run("note", "a turn of the loop")
            assert len(loopy.answers.items(call)) == expected
            assert loopy.plain.made == expected + 1
        assert loopy.answers.items(call) == list(range(8))

    def test_cancelling_closes_the_generator(self, loopy):
        call = loopy.call("count", 1000, window=2)
        loopy.answers.until(2)
        loopy.invocation(call).cancel()
        assert loopy.plain.closed.wait(10)

    def test_an_error_follows_the_items(self, loopy):
        call = loopy.call("breaks", window=16)
        with pytest.raises(ValueError, match="dry"):
            loopy.answers.value(call)
        assert loopy.answers.items(call) == [1]

    def test_a_method_that_does_not_stream_says_so(self, loopy):
        with pytest.raises(UsageError, match=r"note\(\) does not stream"):
            loopy.run("note", 1, window=4)


@pytest.fixture(params=["serial", "loopy"])
def served(request):
    """A class without async def, and one with."""
    return request.getfixturevalue(request.param)


class TestPlainGenerators:
    def test_items_then_the_end_all_on_the_main_thread(self, served):
        call = served.call("generate", 3, window=16)
        assert served.answers.value(call) is None
        assert served.answers.items(call) == [0, 1, 2]
        assert set(served.plain.ran) == {"main-of-the-worker", "closed on main-of-the-worker"}

    def test_never_more_than_the_window_ahead(self, served):
        call = served.call("generate", 1000, window=4)
        served.answers.until(4)
        for taken, expected in ((1, 5), (3, 8)):
            served.invocation(call).credit(taken)
            served.answers.until(expected)
        served.invocation(call).cancel()
        assert served.plain.closed.wait(10)
        assert served.answers.items(call) == list(range(8))
        assert served.plain.made <= 9

    def test_an_endless_one_keeps_nothing_of_the_credit_that_came(self, serial):
        call = serial.call("generate", 1000, window=2)
        serial.answers.until(2)
        invocation = serial.invocation(call)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            serial.plain.pause.clear()
            invocation.credit(1)
            assert serial.plain.paused.wait(10)
            for _ in range(50_000):
                invocation.credit(0)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
            serial.plain.pause.set()
        invocation.cancel()
        assert serial.plain.closed.wait(10)
        assert grown < 100_000

    def test_cancelling_closes_it_on_the_main_thread(self, served):
        call = served.call("generate", 1000, window=2)
        served.answers.until(2)
        served.invocation(call).cancel()
        assert served.plain.closed.wait(10)
        assert served.plain.ran[-1] == "closed on main-of-the-worker"
        assert served.run("note", "next") == "next"

    def test_one_that_was_cancelled_before_its_turn_never_begins(self, served):
        served.call("block")
        assert served.plain.entered.acquire(timeout=10)
        call = served.call("generate", 3, window=2)
        served.invocation(call).cancel()
        served.plain.go.set()
        assert served.run("note", "next") == "next"
        assert served.plain.made == 0

    def test_an_error_follows_the_items(self, served):
        call = served.call("generates_and_breaks", window=16)
        with pytest.raises(ValueError, match="dry"):
            served.answers.value(call)
        assert served.answers.items(call) == [1]

    def test_an_item_that_does_not_travel_closes_it(self, served):
        with pytest.raises(SerializationError, match=r"an item of generates_what_cannot_travel\(\)"):
            served.run("generates_what_cannot_travel", window=16)
        assert served.plain.closed.wait(10)

    def test_one_that_cannot_be_closed_is_logged(self, served, caplog):
        call = served.call("breaks_when_closed", window=1)
        served.answers.until(1)
        served.invocation(call).cancel()
        assert served.plain.closed.wait(10)
        served.run("note", 1)
        assert "breaks_when_closed() raised after its caller had left the stream" in caplog.text
        assert "ValueError: cannot be closed" in caplog.text

    def test_a_method_that_does_not_stream_says_so(self, served):
        with pytest.raises(UsageError, match=r"note\(\) does not stream: it is not a generator"):
            served.run("note", 1, window=4)

    @pytest.mark.parametrize("method", ["returns_a_generator", "returns_an_async_generator"])
    def test_what_returns_a_generator_and_is_none_says_what_to_write(self, served, method):
        with pytest.raises(SerializationError, match=rf"result of {method}\(\) cannot .*generator.* write 'yield from"):
            served.run(method)

    def test_a_serial_worker_runs_nothing_else_while_the_stream_waits(self, serial):
        call = serial.call("generate", 3, window=1)
        serial.answers.until(1)
        queued = serial.call("note", "after")
        assert serial.executor.activity().waiting == 1
        assert serial.executor.activity().method == "generate"
        serial.invocation(call).credit(2)
        serial.answers.value(queued)
        assert serial.plain.ran[-2:] == ["closed on main-of-the-worker", "after"]

    def test_a_loop_runs_other_calls_between_items(self, loopy):
        call = loopy.call("generate", 1000, window=1)
        loopy.answers.until(1)
        assert loopy.run("note", "meanwhile") == "meanwhile"
        assert not loopy.plain.closed.is_set()
        loopy.invocation(call).cancel()
        assert loopy.plain.closed.wait(10)


class TestBeside:
    """Methods with threads of their own, beside a busy main thread."""

    @pytest.fixture(params=[SerialExecutor, LoopExecutor])
    def beside(self, request, rlinf_leak_check, monkeypatch):
        monkeypatch.setattr(threading, "excepthook", lambda _: None)  # how the kit ends threads
        instance = Loopy()
        served = worker_kit.Served(
            BesideExecutor(request.param(), {"where": 1, "generate": 1, "wait_here": 2}, lambda: None), instance
        )
        served.plain = instance
        yield served
        instance.go.set()
        served.close()

    def test_they_answer_while_the_main_thread_is_busy(self, beside):
        blocked = beside.call("block")
        assert beside.plain.entered.acquire(timeout=10)
        assert beside.run("where") == "worker-where-1"
        call = beside.call("generate", 3, window=16)
        beside.answers.value(call)
        assert beside.answers.items(call) == [0, 1, 2]
        assert set(beside.plain.ran) == {"worker-generate-1", "closed on worker-generate-1"}
        beside.plain.go.set()
        assert beside.answers.value(blocked) == "main-of-the-worker"

    def test_each_has_as_many_threads_as_it_says(self, beside):
        calls = [beside.call("wait_here") for _ in range(3)]
        for _ in range(2):
            assert beside.plain.entered.acquire(timeout=10)
        assert beside.run("note", "the main thread is free") is not None
        assert beside.run("where") == "worker-where-1"
        assert not beside.plain.entered.acquire(blocking=False)
        assert beside.executor.activity().waiting == 1
        beside.plain.go.set()
        assert {beside.answers.value(call) for call in calls} == {"worker-wait_here-1", "worker-wait_here-2"}

    def test_one_that_waits_for_its_thread_expires_and_is_cancelled(self, beside):
        running = [beside.call("wait_here") for _ in range(2)]
        for _ in running:
            assert beside.plain.entered.acquire(timeout=10)
        late, cancelled = beside.call("wait_here", deadline_s=1e-9), beside.call("wait_here")
        beside.invocation(cancelled).cancel()
        beside.plain.go.set()
        with pytest.raises(CallTimeoutError, match="was not started"):
            beside.answers.value(late)
        for call in running:
            beside.answers.value(call)
        assert cancelled not in beside.answers.order()

    def test_the_main_threads_call_is_what_runs_and_theirs_where_there_is_none(self, beside):
        waiting = beside.call("wait_here")
        assert beside.plain.entered.acquire(timeout=10)
        assert beside.executor.activity() == ("wait_here", beside.invocation(waiting).began, 0)
        blocked = beside.call("block")
        assert beside.plain.entered.acquire(timeout=10)
        assert beside.executor.activity() == ("block", beside.invocation(blocked).began, 0)

    def test_their_errors_are_answers(self, beside):
        with pytest.raises(TypeError, match="takes 1 positional argument"):
            beside.run("where", 1)
        assert beside.run("where") == "worker-where-1"


class TestWhichExecutor:
    """A class uses the loop if the user's part of it has any async def."""

    class NoAsync(Worker):
        def f(self): ...

    class Coroutine(NoAsync):
        async def g(self): ...

    class Generator(NoAsync):
        async def g(self):
            yield 1

    class Inherits(Coroutine):
        def h(self): ...

    class Static(NoAsync):
        @staticmethod
        async def g(): ...

    class OfClass(NoAsync):
        @classmethod
        async def g(cls): ...

    class Timed(NoAsync):
        @Worker.timer("t")
        async def g(self): ...

    class Private(NoAsync):
        async def _g(self): ...

    class Mixin:
        async def g(self): ...

    class WithMixin(Mixin, NoAsync):
        pass

    @pytest.mark.parametrize(
        ("cls", "loop"),
        [
            (NoAsync, False),
            (Coroutine, True),
            (Generator, True),
            (Inherits, True),
            (Static, True),
            (OfClass, True),
            (Timed, True),
            (Private, True),
            (WithMixin, True),
        ],
    )
    def test_is_what_the_class_says(self, cls, loop):
        assert uses_event_loop(cls, Worker) is loop


LEAVES = """
import asyncio, ctypes, signal, sys
from rlinf_actors.net.loop import IoThread
from rlinf_actors.worker.executors import LoopExecutor
from rlinf_actors.worker.main import OrderlyExit

leaving = OrderlyExit()
leaving.watch(IoThread("io"))
executor = LoopExecutor(on_loop_start=leaving.take_wakeup_fd)

def stand_in_c():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in a call that is not interrupted
    print("there", flush=True)
    ctypes.CDLL(None).sleep(1000)

def wait_for_another():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: print("SIGUSR1", flush=True))
    print("there", flush=True)

where, act = sys.argv[1], globals()[sys.argv[2]]
instance = executor.begin(act if where == "constructor" else object)
executor._loop.call_soon(act)  # as a call that has come meanwhile
executor.serve(instance)
"""


def leaves(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LEAVES, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize("where", ["constructor", "call"])
def test_sigterm_ends_a_loop_whose_thread_is_in_c(where):
    """uvloop takes Python's descriptor for signals whenever it begins to run."""
    with leaves(where, "stand_in_c") as process:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(pace.PATIENCE_S) == -signal.SIGTERM
        finally:
            process.kill()


def test_idle_loop_hears_its_own_signals_and_sigterm():
    with leaves("call", "wait_for_another") as process:
        process.send_signal(signal.SIGUSR1)
        try:
            assert process.stdout.readline() == "SIGUSR1\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(pace.PATIENCE_S) == -signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["a concurrent method", "max_concurrency"])
def test_internal_error_on_a_call_thread_ends_the_worker(kind, rlinf_leak_check):
    """It would end that thread alone, and later calls would wait for ever."""
    plain, ended = Plain(), threading.Event()
    if kind == "max_concurrency":
        executor, methods = ThreadsExecutor(2, ended.set), ["block", "block"]
    else:
        executor, methods = BesideExecutor(SerialExecutor(), {"where": 1}, ended.set), ["where"]
    served = worker_kit.Served(executor, plain)

    def reply(*_):
        if threading.current_thread() is not served.thread:
            raise RuntimeError("a bug of ours")

    for method in methods:
        parts = AuthenticatedParts(payload.encode_call((), {}))
        executor.submit(Invocation(b"driver", 1, method, parts, reply, bytes, 0.0, 0))
    for method in methods:
        assert method == "where" or plain.entered.acquire(timeout=10)  # each on a thread of its own
    plain.go.set()
    assert ended.wait(10)
    served.close()


FORKS_WHILE_WOKEN = """
import asyncio, os, queue, select, threading
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker.executors import LoopExecutor
from rlinf_actors.worker.invocation import Invocation

answers = queue.SimpleQueue()
executor = LoopExecutor()

def call(method):
    parts = AuthenticatedParts(payload.encode_call((), {}))
    reply = lambda *_: answers.put(method)
    executor.submit(Invocation(b"driver", 1, method, parts, reply, bytes, 0.0, 0))

class Forks:
    async def fork(self):
        await asyncio.create_task(self.task())

    async def task(self):
        caller = threading.Thread(target=call, args=("note",))
        caller.start()
        caller.join()  # both the call and what wakes the loop for it are there when the child is made
        child = os.fork()
        if not child:
            return
        os.waitpid(child, 0)
        events = select.epoll.fromfd(os.dup(executor._loop._get_backend_id())).poll(0)
        print("still due" if events else "lost", flush=True)

    def note(self):
        print("noted in", "the parent" if os.getpid() == parent else "a child", flush=True)

def drive():
    call("fork")
    for _ in range(2):
        answers.get()
    os._exit(0)

parent = os.getpid()
threading.Thread(target=drive, daemon=True).start()
executor.serve(Forks())
"""


def test_forked_child_takes_no_call_and_no_wakeup_of_its_parent():
    """The descriptors are the child's too, and uvloop has one more turn before it stops."""
    pytest.importorskip("uvloop")
    done = subprocess.run(
        [sys.executable, "-c", FORKS_WHILE_WOKEN], capture_output=True, text=True, timeout=pace.PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["still due", "noted in the parent"]), done.stderr
