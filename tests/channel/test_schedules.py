"""Seeded schedules of producers and consumers, with deaths and lost connections at any point.

What must hold: no accepted item is lost, no item comes twice without the mark, and each consumer gets the items of one
producer and key in their order.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import random

import pace
import pytest
from channel_kit import User, World, settle

from rlinf_actors.errors import ConnectionLostError

pytestmark = pytest.mark.model

KEYS = ("k", "l")
SCHEDULES = 20 * pace.rounds
STEPS = 60


class Schedule:
    """One random run; *seed* decides everything."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(maxsize=self.random.choice((0, 3)), max_bytes=self.random.choice((0, 3000)))
        self.names = iter(range(1000))
        self.users = [self.user() for _ in range(4)]
        self.numbers: collections.Counter[tuple[str, str]] = collections.Counter()
        self.puts: list[tuple[tuple, object]] = []
        self.gets: list[tuple[User, object, bool]] = []
        self.graves: list[object] = []
        self.sure: set[tuple] = set()  # items whose put was confirmed
        self.got: collections.Counter[tuple] = collections.Counter()
        self.marked: collections.Counter[tuple] = collections.Counter()
        self.order: dict[tuple, list[tuple[int, int]]] = collections.defaultdict(list)
        self.drops = seed % 2 == 0  # an item of a dropped get comes again later, unmarked, since no code has seen it

    def user(self) -> User:
        return self.world.user(f"u{next(self.names):03}")

    async def run(self) -> None:
        for _ in range(STEPS):
            step = self.random.choice(
                (self.put, self.put, self.get, self.get, self.take, self.turns, self.turns, self.harm)
            )
            await step()
        await self.finish()

    async def put(self) -> None:
        user, key = self.random.choice(self.users), self.random.choice(KEYS)
        for _ in range(self.random.choice((1, 1, 5, 20))):
            number = self.numbers[user.identity, key]
            self.numbers[user.identity, key] += 1
            item = (user.identity, key, number)
            self.puts.append((item, user.put(item, key=key, weight=self.random.choice((0, 1)))))

    async def get(self) -> None:
        user, key = self.random.choice(self.users), self.random.choice(KEYS)
        for _ in range(self.random.choice((1, 1, 5, 20))):
            batch = self.random.random() < 0.1
            self.gets.append((user, user.batch(2, key=key) if batch else user.get(key=key), batch))

    async def take(self) -> None:
        """User code takes some of what has arrived."""
        left = []
        for user, work, batch in self.gets:
            if work.done() and self.random.random() < 0.7:
                self.received(user, work, batch)
            elif not self.drops or self.random.random() < 0.95:
                left.append((user, work, batch))  # the others are dropped, taken or not
        self.gets = left

    async def turns(self) -> None:
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)

    async def harm(self) -> None:
        user = self.random.choice(self.users)
        if self.random.random() < 0.5:
            self.world.lose(user)
            await settle()  # what it asked for on the old connection has failed
            return
        self.users.remove(user)
        self.world.die(user)
        self.graves.append([entry for entry in self.gets if entry[0] is user])  # a dead process drops nothing
        self.gets = [entry for entry in self.gets if entry[0] is not user]
        self.puts = [(item, work) for item, work in self.puts if item[0] != user.identity or self.confirmed(item, work)]
        self.users.append(self.user())

    def confirmed(self, item, work) -> bool:
        if work.done() and work.error is None:
            self.sure.add(item)
            return True
        return False

    def received(self, user: User, work, batch: bool) -> None:
        try:
            value = work.wait()
        except ConnectionLostError:
            return
        for item in map(tuple, value if batch else [value]):
            self.got[item] += 1
            self.marked[item] += work.redelivered
            if not work.redelivered:
                self.order[(user.identity, *item[:2])].append((work.call, item[2]))

    async def finish(self) -> None:
        """Everybody takes what has arrived; a new consumer gets the rest."""
        for user, work, batch in self.gets:
            if work.done():
                self.received(user, work, batch)
            else:
                work.cancel()
        self.gets = []
        gc.collect()
        await settle()
        last = self.user()
        for _ in range(1000):
            got = [await self.rest(last, key) for key in KEYS]
            if not any(got) and all(work.done() for _, work in self.puts):
                break
        for item, work in self.puts:
            if self.confirmed(item, work):
                continue
            assert isinstance(work.error, ConnectionLostError)
            work._seen = True
        lost = self.sure - set(self.got)
        assert not lost, f"{len(lost)} accepted items were lost: {sorted(lost)[:5]}"
        if not self.drops:
            for place, found in self.order.items():
                numbers = [number for _, number in sorted(found)]
                assert numbers == sorted(numbers), f"{place} came out of order"
        for item, count in self.got.items():
            assert count - self.marked[item] <= 1, f"{item} came {count} times, {self.marked[item]} of them marked"
        await settle()
        assert self.world.queue.in_use() == []
        assert self.world.queue.nbytes == 0

    async def rest(self, user: User, key: str) -> bool:
        """Let *user* take one item, if there is any; return True if there was."""
        await settle()
        work = user.get(key=key, nowait=True)
        try:
            await work
        except asyncio.QueueEmpty:
            return False
        self.received(user, work, False)
        return True


@pytest.mark.parametrize("first", range(0, SCHEDULES, 20))
async def test_no_accepted_item_is_lost_and_none_comes_twice_unmarked(first):
    for seed in range(first, first + 20):
        try:
            await Schedule(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
            raise
