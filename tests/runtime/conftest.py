from __future__ import annotations

import asyncio

import pytest
from fake_worker import FakeWorker

from rlinf_actors.runtime.peer import Peer
from tests.memory_network import MemoryNetwork


@pytest.fixture
async def network():
    return MemoryNetwork(asyncio.get_running_loop())


@pytest.fixture
async def worker(network):
    """A stand-in worker that listens."""
    return FakeWorker(network, "ipc:///w0")


@pytest.fixture
async def peer(network):
    """A peer that is not connected yet."""
    made = Peer(network, "driver:x", "g:0", 0, "node0")
    made.worker_id = "id-0"
    return made
