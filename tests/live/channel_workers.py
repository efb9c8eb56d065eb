"""Worker classes of the live tests of channels. Importable in workers: pytest puts this directory on sys.path."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import threading
from typing import Any

import live_workers as lw
from blocking import no_blocking

from rlinf_actors import Channel, ChannelClosedError, ItemNotProcessedError, Worker


def memory(pid: int) -> int:
    """What a process uses, in bytes; of memory that it shares, its part."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def ticks(pid: int) -> int:
    """What a process, all its threads, has used of the processor, in the kernel's ticks."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def host_pid(channel: Channel, rank: int = 0) -> int:
    """Known once the channel answers."""
    channel.qsize()
    return channel._backend._group.states[rank].pid


def launch(cluster: Any, count: int = 1, cls: Any = None, **options: Any) -> Any:
    """Workers on node 0."""
    return lw.many(cluster, cls or User, count, **options)


def kill(group, rank=0):
    """kill -9 of one worker."""
    os.kill(group.execute_on(rank).pid().wait()[0], signal.SIGKILL)


class User(Worker):
    """Puts and gets, blocking."""

    def pid(self) -> int:
        return os.getpid()

    def put(self, channel: Channel, items: list[Any], **options: Any) -> None:
        for item in items:
            channel.put(item, **options)

    def get(self, channel: Channel, count: int = 1, **options: Any) -> list[Any]:
        return [channel.get(**options) for _ in range(count)]

    def put_nowait(self, channel: Channel, item: Any) -> str:
        try:
            channel.put_nowait(item)
        except asyncio.QueueFull as error:
            return type(error).__name__
        return "in"

    def mixed(self, channel: Channel) -> list[Any]:
        """An async get that waits, and sync gets of another key meanwhile."""
        waiting = channel.get("slow", async_op=True)
        quick = [channel.get("quick") for _ in range(3)]
        channel.put("go", key="asked")
        return [*quick, waiting.wait()]

    def hold(self, channel: Channel) -> bool:
        """Have an item delivered and not take it."""
        self._held = channel.get(async_op=True)
        arrived = threading.Event()
        self._held._on_done(arrived.set)
        return arrived.wait(60)

    def put_async(self, channel: Channel, items: list[Any]) -> None:
        """All under way at once; returns when all are in."""
        for work in [channel.put(item, async_op=True) for item in items]:
            work.wait()

    def error_of_get(self, channel: Channel, asked: Channel | None = None) -> str:
        try:
            if asked is not None:
                channel.qsize()
                asked.put("waiting")
            channel.get()
        except Exception as error:  # noqa: BLE001 - which one is the answer
            return type(error).__name__
        return "none"

    def take_all(self, channel: Channel, taken: Channel) -> tuple[list[Any], str]:
        """What a loop over a channel gives, each item put into *taken* as well, and the error that ends it."""
        items = []
        try:
            for item in channel:
                items.append(item)
                taken.put(item)
        except Exception as error:  # noqa: BLE001 - which one is the answer
            return items, f"{type(error).__name__}: {error}"
        return items, ""

    def get_behind_a_put(self, channel: Channel) -> Any:
        """A get that is at the host before what it puts under the key "ready"."""
        getting = channel.get(async_op=True)
        channel.put("asked", key="ready")
        return getting.wait()

    def put_and_wait(self, channel: Channel, item: Any) -> None:
        """A put that is at the host before what it puts under the key "ready"."""
        putting = channel.put(item, async_op=True)
        channel.put("asked", key="ready")
        putting.wait()

    def turns(self, channel: Channel) -> list[Any]:
        """Gets of one key, each by other means than the one before."""
        works = [channel.get(async_op=True)]
        channel.put("asked", key="ready")
        got = channel.get()
        works.append(channel.get(async_op=True))
        last = channel.get()
        return [works[0].wait(), got, works[1].wait(), last]

    def put_array(self, channel: Channel, nbytes: int) -> None:
        """One large item. Never returns."""
        import numpy as np

        channel.put("soon", key="ready")
        channel.put(np.ones(nbytes, np.uint8))
        threading.Event().wait()

    def flood(self, channel: Channel, nbytes: int, count: int) -> tuple[int, int, int]:
        """Many puts of one array; own memory (bytes) before and after, and how many are in."""
        import numpy as np

        item = np.ones(nbytes, np.uint8)
        channel.put(item, key="warm")
        channel.get("warm")
        before = memory(os.getpid())
        works = [channel.put(item, async_op=True) for _ in range(count)]
        for _ in range(5):
            channel.qsize()  # behind the puts that were sent, and its answer behind theirs
        self._works = works
        return before, memory(os.getpid()), sum(work.done() for work in works)

    def produce(self, channel: Channel, item: Any, count: int, under_way: int) -> None:
        works: collections.deque[Any] = collections.deque()
        for _ in range(count):
            if len(works) == under_way:
                works.popleft().wait()
            works.append(channel.put(item, async_op=True))
        for work in works:
            work.wait()

    def consume(self, channel: Channel, count: int, under_way: int) -> int:
        """Get *count* items; return the sum of their lengths."""
        works = collections.deque(channel.get(async_op=True) for _ in range(min(count, under_way)))
        total = 0
        for n in range(count):
            total += len(works.popleft().wait())
            if n + under_way < count:
                works.append(channel.get(async_op=True))
        return total

    def take_and_die(self, channel: Channel, **options: Any) -> None:
        """kill -9 in the middle of the processing."""
        with channel.take(**options):
            os.kill(os.getpid(), signal.SIGKILL)

    def take_until(self, channel: Channel, told: Channel) -> int:
        """Process an item until the key "done" has one; which delivery it was."""
        take = channel.take()
        with take as item:
            told.put(item)
            told.get("done")
        return take.deliveries

    def process(self, channel: Channel) -> tuple[list[Any], list[str]]:
        """Take everything: what was processed, and what was told instead of items. An item that is negative fails."""
        done, told = [], []
        while True:
            try:
                with channel.take() as item:
                    if item < 0:
                        raise ValueError(f"{item} is negative")
                    done.append(item)
            except ChannelClosedError:
                return done, told
            except ValueError:
                continue
            except ItemNotProcessedError as error:
                told.append(error.reason)

    def make_with(self, name: str, items: list[Any], **options: Any) -> Channel:
        channel = self.create_channel(name, **options)
        for item in items:
            channel.put(item)
        return channel

    def make(self, *args: Any, **options: Any) -> Channel:
        channel = self.create_channel(*args, **options)
        channel.put("made here")
        return channel

    def connect(self, name: str) -> Any:
        return self.connect_channel(name=name).get()


class Awaiting(Worker):
    """The same on an event loop."""

    async def ends(self, channel: Channel, asked: Channel) -> list[str]:
        """How a get, a batch, a put into a full key and a loop end; all of them wait when `asked` gets something."""
        works = [
            channel.get(async_op=True),
            channel.get_batch(5, key="batch", async_op=True),
            channel.put(1, key="full", async_op=True),
            asyncio.ensure_future(self.drain(channel)),
        ]
        await asyncio.sleep(0)
        channel.qsize()
        asked.put("waiting")
        ended = await asyncio.gather(*(_outcome(work) for work in works))
        return [type(outcome).__name__ for outcome in ended]

    async def nothing_blocks(self, channel: Channel, head: int) -> dict[str, str]:
        """Every operation on a handle that came as an argument, and the makers, while the head stands still."""
        makers = {
            "create_channel": lambda: self.create_channel("of_a_worker", async_op=True),
            "create_channel beside": lambda: self.create_channel("older", group_affinity="asyncs", async_op=True),
            "connect_channel": lambda: self.connect_channel(channel_name=channel.name, async_op=True),
        }
        return await nothing_blocks(channel, head, makers)

    async def drain(self, channel: Channel) -> list[Any]:
        return [item async for item in channel]

    async def get_cancelled(self, channel: Channel, times: int) -> list[Any]:
        """Gets that are cancelled, some with their item on its way; then all that is left."""
        taken = []
        for _ in range(times):
            waiting = asyncio.ensure_future(channel.get(async_op=True).async_wait())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                taken.append(waiting.result())  # it had arrived before the task first ran: too late to cancel
        return taken + [await channel.get(async_op=True) for _ in range(times - len(taken))]


async def _outcome(work: Any) -> Any:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - which one is the answer
        return error


async def nothing_blocks(channel: Channel, head: int, makers: dict[str, Any]) -> dict[str, str]:
    """What became of every operation on a channel with one item, "there", all begun while the head stands still.

    Args:
        channel: a handle that came to this process, and was not used yet.
        head: the process that is stopped.
        makers: what else is begun.
    """
    operations = {
        "take": lambda: asyncio.ensure_future(_taken(channel)),
        "put": lambda: channel.put("put", key="k", async_op=True),
        "put_nowait": lambda: channel.put_nowait("nowait", key="k", async_op=True),
        "get": lambda: channel.get("k", async_op=True),
        "get_nowait": lambda: channel.get_nowait("k", async_op=True),
        "get_batch": lambda: channel.get_batch(0, "k", async_op=True),
        "qsize": lambda: channel.qsize("k", async_op=True),
        "empty": lambda: channel.empty("k", async_op=True),
        "full": lambda: channel.full("k", async_op=True),
        "describe": lambda: channel.describe(async_op=True),
        "undeliverable": lambda: channel.undeliverable(async_op=True),
        "drain": lambda: channel.undeliverable(drain=True, async_op=True),
        "loop": lambda: asyncio.ensure_future(_looped(channel)),
        **makers,
        "maxsize": lambda: channel.maxsize,
        "repr": lambda: repr(channel),
    }
    with no_blocking():
        os.kill(head, signal.SIGSTOP)
        try:
            works = {name: begin() for name, begin in operations.items()}
            for _ in range(100):
                await asyncio.sleep(0)
            early = [name for name, work in works.items() if not isinstance(work, (str, int)) and work.done()]
        finally:
            os.kill(head, signal.SIGCONT)
        assert not early, f"done while the head stood still: {early}"
        ended = {name: work if isinstance(work, (str, int)) else await work for name, work in works.items()}
        ended["close"] = await channel.close(async_op=True)
        return {name: repr(value) if isinstance(value, Channel) else str(value) for name, value in ended.items()}


async def _taken(channel: Channel) -> Any:
    async with channel.take() as item:
        return item


async def _looped(channel: Channel) -> Any:
    return await anext(aiter(channel))
