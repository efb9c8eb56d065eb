"""Channels: what is put, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf_actors import AsyncWork, Channel, ChannelClosedError, ItemNotProcessedError, Take, UndeliverableItem, Worker

if TYPE_CHECKING:
    from typing_extensions import assert_type

channel: Channel[int] = Channel.create("n")
assert_type(Channel.create("n", maxsize=64, max_deliveries=5), Channel[Any])
assert_type(Channel.create("n", async_op=True), AsyncWork[Channel[Any]])
assert_type(Channel.connect("n"), Channel[Any])
assert_type(Channel.connect("n", async_op=True), AsyncWork[Channel[Any]])
Channel.create("untyped").put({"a": 1})

assert_type(channel.put(1), None)
assert_type(channel.put(1, 2.0, "key", timeout=3), None)
assert_type(channel.put(1, key=("a", 1), async_op=True), AsyncWork[None])
assert_type(channel.put_nowait(1, async_op=True), AsyncWork[None])
assert_type(channel.get(), int)
assert_type(channel.get("key", timeout=1.5), int)
assert_type(channel.get(async_op=True), AsyncWork[int])
assert_type(channel.get_nowait(), int)
assert_type(channel.get_nowait(async_op=True), AsyncWork[int])
assert_type(channel.get_batch(64), list[int])
assert_type(channel.get_batch(64, async_op=True), AsyncWork[list[int]])
assert_type([item + 1 for item in channel], list[int])
assert_type(channel.qsize(), int)
assert_type(channel.qsize("key", async_op=True), AsyncWork[int])
assert_type(channel.empty(async_op=True), AsyncWork[bool])
assert_type(channel.full(), bool)
assert_type(channel.maxsize, int)
assert_type(channel.describe(async_op=True), AsyncWork[str])
assert_type(channel.undeliverable(), list[UndeliverableItem[int]])
assert_type(channel.undeliverable("key", drain=True, async_op=True), AsyncWork[list[UndeliverableItem[int]]])
assert_type(channel.take("key", timeout=1), Take[int])
assert_type(channel.close(), None)
assert_type(channel.close(async_op=True), AsyncWork[None])


def either(wait: bool) -> None:
    work = channel.put(1, async_op=not wait)
    if work is not None:
        work.wait()


def process() -> int:
    total = 0
    while True:
        take = channel.take()
        try:
            with take as item:
                assert_type(item, int)
                total += item * take.deliveries
        except ItemNotProcessedError as error:
            print(error.key, error.deliveries, error.consumer, error.reason)
        except ChannelClosedError:
            return total


class Consumer(Worker):
    async def run(self, items: Channel[str]) -> list[str]:
        mine: Channel[int] = await self.create_channel("mine", async_op=True)
        theirs: Channel[int] = self.connect_channel("theirs")
        assert_type(self.connect_channel(name="theirs"), Channel[Any])
        assert_type(self.connect_channel(channel_name="theirs", async_op=True), AsyncWork[Channel[Any]])
        assert_type(Channel.connect("theirs", self), Channel[Any])
        await mine.put(len(await items.get(async_op=True)), async_op=True)
        async with theirs.take() as number:
            assert_type(number, int)
        return [item async for item in items]
