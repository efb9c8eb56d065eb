from __future__ import annotations

import shutil
import tempfile

import net_kit
import pytest


@pytest.fixture
def short_dir():
    """A directory whose path leaves room for a unix socket's name."""
    path = tempfile.mkdtemp(prefix="rlt-", dir="/tmp")
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=net_kit.KINDS)
async def wire(request, short_dir, rlinf_leak_check):
    """Each kind of network."""
    async with net_kit.wire(request.param, short_dir) as made:
        yield made


@pytest.fixture(params=[kind for kind in net_kit.KINDS if kind in ("ipc", "tcp")])
async def zmq_wire(request, short_dir, rlinf_leak_check):
    """ZeroMQ only."""
    async with net_kit.wire(request.param, short_dir) as made:
        yield made
