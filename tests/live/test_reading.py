"""Threads and event loops of one driver read its sockets in turns: every call ends, with its own result."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from reading_workers import Echo, LoopEcho

from rlinf_actors import CallTimeoutError, Channel, Cluster, NodePlacementStrategy
from rlinf_actors.net import reading
from rlinf_actors.net.loop import new_event_loop

LIMIT_S = 60.0
"""A wait that lasts longer has lost its wake-up."""
CALLS = 300


def _in_threads(works: list[Callable[[], None]]) -> None:
    """Run *works*, each on a thread; raise the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_and_loops_share_the_sockets(cluster: Cluster) -> None:
    plain = Echo.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="plain")
    assert all(plain.reads().wait(LIMIT_S))
    assert reading.active is not None
    loops = LoopEcho.create_group().launch(cluster, NodePlacementStrategy([0]), name="loops")

    def calls(seed: int) -> None:
        rng = random.Random(seed)
        for n in range(CALLS):
            group: Any = rng.choice((plain, loops))
            value = (seed, n)
            kind = rng.random()
            if kind < 0.1:
                late = loops.late(5.0)
                with pytest.raises(CallTimeoutError):
                    late.wait(rng.random() * 0.003)
                late.cancel()
            elif kind < 0.3:
                several = [group.echo((value, i)) for i in range(rng.randrange(1, 8))]
                rng.shuffle(several)
                assert all(result.wait(LIMIT_S)[0][0] == value for result in several)
            else:
                assert set(group.echo(value).wait(LIMIT_S)) == {value}

    def loop(seed: int) -> None:
        async def one(n: int) -> None:
            group: Any = (plain, loops)[n % 2]
            async with asyncio.timeout(LIMIT_S) if hasattr(asyncio, "timeout") else _no_limit():
                assert set(await group.echo((seed, n))) == {(seed, n)}

        async def main() -> None:
            for n in range(CALLS):
                await asyncio.gather(*[one(10 * n + i) for i in range(1 + n % 3)])

        if seed % 2:
            running = new_event_loop()  # uvloop's
            running.run_until_complete(main())
            running.close()
        else:
            asyncio.run(main())

    _in_threads(
        [*[lambda seed=seed: calls(seed) for seed in range(8)], *[lambda s=s: loop(s) for s in range(100, 104)]]
    )  # type: ignore[misc]


class _no_limit:
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...


def test_workers_read_while_they_wait_for_messages_and_calls(cluster: Cluster) -> None:
    group = Echo.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="relays")
    pong = group.execute_on(1).pong("relays", 0, 500)
    assert group.execute_on(0).ping("relays", 1, 500).wait(LIMIT_S) == [500]
    pong.wait(LIMIT_S)
    others = Echo.create_group().launch(cluster, NodePlacementStrategy([0]), name="others")
    expected = sum(1000 * t + i for t in range(4) for i in range(100))
    assert group.relay(others, 100).wait(LIMIT_S) == [expected] * 2


def test_threads_and_loops_share_the_requests_to_a_channel(cluster: Cluster) -> None:
    """Some items are lent in shared memory; gets are cancelled and dropped meanwhile."""
    channel: Channel[Any] = Channel.create("shared_reading", maxsize=50)
    found: list[int] = []

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        for n in range(CALLS):
            item = (seed * CALLS + n, b"x" * (200_000 if rng.random() < 0.02 else 10))
            if rng.random() < 0.5:
                channel.put(item)
            else:
                works = [channel.put(item, async_op=True), channel.put(None, key="others", async_op=True)]
                for work in works:
                    work.wait(LIMIT_S)
                channel.get("others", timeout=LIMIT_S)

    def consume(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(CALLS):
            kind = rng.random()
            if kind < 0.2:
                channel.get(async_op=True).cancel()
            if kind < 0.4:
                dropped = channel.get(async_op=True)
                del dropped
            if kind < 0.8:
                found.append(channel.get(timeout=LIMIT_S)[0])
            else:
                with channel.take(timeout=LIMIT_S) as item:
                    found.append(item[0])

    def loop() -> None:
        async def main() -> None:
            for n in range(0, CALLS, 3):
                works = [channel.get(async_op=True, timeout=LIMIT_S) for _ in range(3)]
                found.extend([item[0] for item in await asyncio.gather(*works)])
                assert await channel.qsize(async_op=True) >= 0, n

        asyncio.run(main())

    works: list[Callable[[], None]] = [lambda seed=seed: produce(seed) for seed in range(3)]  # type: ignore[misc]
    _in_threads([*works, lambda: consume(8), lambda: consume(9), loop])
    assert sorted(found) == list(range(3 * CALLS))
    assert channel.empty()
    assert channel.empty("others")


def test_interrupted_wait_loses_no_answer(cluster: Cluster) -> None:
    """Signals hit the main thread while it waits and handles answers; their handler raises."""
    group = Echo.create_group().launch(cluster, NodePlacementStrategy([0]), name="interrupted")
    group.echo(0).wait(LIMIT_S)

    class Struck(Exception):
        pass

    waiting = False

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if frame is not None and frame.f_code.co_filename == weakref.__file__:
            return  # in a callback of the garbage collector, whose exceptions Python only prints
        if waiting:
            waiting = False  # once: a second one would strike the handling of the first
            raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    stop = threading.Event()

    def shoot() -> None:
        while not stop.wait(0.0007):
            os.kill(os.getpid(), signal.SIGUSR1)

    struck = 0
    shooter = threading.Thread(target=shoot)
    shooter.start()
    results = []
    while not struck or len(results) < 400:
        results.append((len(results), group.echo(len(results))))
        try:
            waiting = True
            results[-1][1].wait(LIMIT_S)
            waiting = False
        except Struck:
            struck += 1
    stop.set()
    shooter.join()
    signal.signal(signal.SIGUSR1, before)
    for n, result in results:
        assert result.wait(LIMIT_S) == [n]
