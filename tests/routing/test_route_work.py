"""AsyncRouteWork: several works as one."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from rlinf_actors import AsyncRouteWork, AsyncWork, CallTimeoutError, PeerDiedError


class Shard(AsyncWork):
    """A get that can be withdrawn."""

    def leave(self):
        self.reject(CallTimeoutError("withdrawn"))


def works(count):
    return [Shard(f"shard {n}") for n in range(count)]


def test_results_are_in_the_order_of_the_shards():
    parts = works(3)
    route = AsyncRouteWork(parts, sum)
    for n in (2, 0):
        parts[n].resolve(10**n)
        assert not route.done()
    parts[1].resolve(10)
    assert route.done()
    assert route.wait() == 111
    assert route.wait() == 111


def test_it_can_be_awaited_and_continued():
    parts = works(2)
    route = AsyncRouteWork(parts, list)
    after = route.then(lambda: "after")

    async def main():
        asyncio.get_running_loop().call_soon(lambda: [part.resolve(n) for n, part in enumerate(parts)])
        return await route.async_wait()

    assert asyncio.run(main()) == [0, 1]
    assert after.wait(5) == "after"
    assert AsyncRouteWork([], lambda items: items).wait() == []


def test_the_first_failure_ends_it_and_drops_the_other_works():
    parts = works(3)
    others = [weakref.ref(part) for part in parts[1:]]
    route = AsyncRouteWork(parts, list)
    parts[0].reject(ValueError("lost"))
    assert route.done()
    del parts
    gc.collect()
    assert [other() for other in others] == [None, None]
    with pytest.raises(ValueError, match="lost"):
        route.wait()


def test_a_work_that_nobody_holds_drops_its_works():
    parts = works(1)
    part = weakref.ref(parts[0])
    route = AsyncRouteWork(parts, list)
    del parts, route
    gc.collect()
    assert part() is None


def test_a_shard_of_a_dead_peer_ends_with_its_death():
    parts = works(2)
    route = AsyncRouteWork(parts, list)
    parts[0].resolve("here")
    route.withdraw(0, PeerDiedError("rank 0 died"))  # its shard is here already
    route.withdraw(1, PeerDiedError("rank 1 died"))
    with pytest.raises(PeerDiedError, match="rank 1 died"):
        route.wait()


def test_a_failing_merge_reaches_the_waiter():
    parts = works(1)
    route = AsyncRouteWork(parts, lambda items: 1 // 0)
    parts[0].resolve(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            route.wait()
