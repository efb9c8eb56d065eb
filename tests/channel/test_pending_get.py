"""A get under way: taking is its last step."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from rlinf_actors.channel.results import PendingGet


class Recorded(PendingGet):
    def __init__(self, decode, said):
        super().__init__("get()")
        self.decode = decode
        self.said = said

    def _decode(self, arrived):
        return self.decode(arrived)

    def _acknowledge(self, arrived):
        self.said.append(f"ack {arrived}")

    def _give_back(self, later):
        self.said.append("later" if later else "back")


class Kit:
    def __init__(self, decode=lambda value: (value, False)):
        self.said = []
        self.work = Recorded(decode, self.said)


def test_taking_acknowledges_once():
    kit = Kit()
    kit.work.resolve("x")
    assert kit.said == []
    assert kit.work.wait() == kit.work.wait() == "x"
    assert kit.said == ["ack x"]
    assert not kit.work.cancel()
    del kit.work
    assert kit.said == ["ack x"]


def test_an_item_that_arrived_and_was_not_taken_goes_back():
    kit = Kit()
    kit.work.resolve("x")
    assert kit.work.cancel()
    assert not kit.work.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        kit.work.wait()
    assert kit.said == ["back"]


@pytest.mark.parametrize("arrived", [False, True])
def test_dropping_a_get_gives_its_item_back(arrived):
    kit = Kit()
    if arrived:
        kit.work.resolve("x")
    del kit.work
    assert kit.said == ["later"]


def test_a_failed_get_has_nothing_to_give_back(caplog):
    kit = Kit()
    kit.work.reject(ValueError("no"))
    assert not kit.work.cancel()
    with pytest.raises(ValueError, match="no"):
        kit.work.wait()
    del kit.work
    assert kit.said == []
    assert not caplog.records


def test_an_item_that_cannot_be_decoded_goes_back():
    def decode(_value):
        raise ImportError("not here")

    kit = Kit(decode)
    kit.work.resolve("x")
    for _ in range(2):
        with pytest.raises(ImportError, match="not here"):
            kit.work.wait()
    del kit.work
    assert kit.said == ["back"]


async def test_cancelling_a_task_that_awaits_a_get_cancels_the_get():
    kit = Kit()
    task = asyncio.ensure_future(kit.work.async_wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert kit.said == ["back"]
    kit.work.resolve("too late")
    with pytest.raises(concurrent.futures.CancelledError):
        kit.work.wait()


async def test_an_item_that_arrives_with_the_cancellation_goes_back():
    kit = Kit()
    task = asyncio.ensure_future(kit.work.async_wait())
    await asyncio.sleep(0)
    kit.work.resolve("x")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert kit.said == ["back"]


def test_arrival_and_cancellation_at_once_end_in_one_way():
    for _ in range(300):
        kit = Kit()
        gate = threading.Barrier(2)

        def arrive(kit=kit, gate=gate):
            gate.wait()
            kit.work.resolve("x")

        thread = threading.Thread(target=arrive)
        thread.start()
        gate.wait()
        assert kit.work.cancel()
        thread.join()
        assert kit.said == ["back"]
