"""agentd's socket to a template."""

import asyncio
import errno
import os
import socket
import subprocess
import sys

import pytest

from agentd.keeper_client import KeeperClient
from agentd.templates import TemplateProcess
from rlinf_actors.wire import template_protocol


def busy(chars):
    return template_protocol.DevicesBusy("w", 1, 1.0, "x" * chars)


@pytest.fixture
def child():
    """A process that runs until its stdin closes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
async def standing(tmp_path, child):
    """A template that does not read, and the other end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = asyncio.Event()
    process = child.pid, os.pidfd_open(child.pid)
    loop = asyncio.get_running_loop()
    keeper, stem = KeeperClient(loop, tmp_path, False), str(tmp_path / "t")
    template = TemplateProcess(loop, keeper, None, ours, stem, process, None, lambda template: ended.set())
    yield template, theirs
    template.kill()
    await ended.wait()
    theirs.close()


@pytest.mark.parametrize(
    "chars", [template_protocol.MAX_PACKET, 2 * template_protocol.MAX_PACKET], ids=["for its reader", "for the kernel"]
)
@pytest.mark.parametrize("behind", [False, True])
async def test_a_packet_that_is_too_large_is_refused_at_once(standing, behind, chars):
    template, theirs = standing
    sent = 0
    while behind and not template._outgoing:
        template.send(busy(30_000))
        sent += 1
    with pytest.raises(OSError, match=os.strerror(errno.EMSGSIZE)):
        template.send(busy(chars))
    template.send(busy(1))
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    for _ in range(sent):
        assert len(await loop.sock_recv(theirs, template_protocol.MAX_PACKET)) > 30_000
    assert template_protocol.decode_to_template(await loop.sock_recv(theirs, template_protocol.MAX_PACKET)) == busy(1)
    assert not template._outgoing


@pytest.mark.parametrize("size", [4096, 200_000])
async def test_kernel_accepts_packets_up_to_the_assumed_size(size):
    """TemplateProcess relies on this."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        room = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - 32
        with pytest.raises(OSError, match=os.strerror(errno.EMSGSIZE)):
            ours.send(bytes(room + 1))
        assert ours.send(bytes(room)) == room
