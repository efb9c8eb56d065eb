"""What one send and one receive of a small object cost above the link: Python calls and locks, which do not drift."""

from __future__ import annotations

import _thread
import collections
import sys
from pathlib import Path

import pytest
from message_kit import World, settle

import rlinf_actors
from rlinf_actors.model.address import WorkerAddress

OURS = str(Path(rlinf_actors.__file__).parent)
RUNS = 10


class Count:
    """Counts the calls of functions of rlinf_actors, and the locks made, on this thread."""

    def __init__(self):
        self.seen = collections.Counter()

    def __enter__(self):
        sys.setprofile(self._event)

    def __exit__(self, *_exc):
        sys.setprofile(None)

    def _event(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.seen["calls"] += 1
        elif event == "c_call" and (arg is _thread.allocate_lock or arg is _thread.RLock):
            self.seen["locks"] += 1


@pytest.fixture
async def pair():
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    for _ in range(3):
        await a.send("b:0", {"step": 1})
        assert await b.recv("a:0") == {"step": 1}
    return a, b


async def test_a_send_and_a_receive_cost_few_calls_and_locks(pair):
    a, b = pair
    sending, receiving = Count(), Count()
    for _ in range(RUNS):
        with sending:
            a.messenger.send(WorkerAddress("b", 0), {"step": 1}, None, now=True).wait()
        await settle()
        with receiving:
            assert b.messenger.receive(WorkerAddress("a", 0)).wait() == {"step": 1}
        await settle()
    assert sending.seen["calls"] <= 44 * RUNS
    assert sending.seen["locks"] <= 1 * RUNS
    assert receiving.seen["calls"] <= 52 * RUNS
    assert receiving.seen["locks"] <= 2 * RUNS
