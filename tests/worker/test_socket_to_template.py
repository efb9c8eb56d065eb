"""A worker's socket to its template."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rlinf_actors.wire import template_protocol
from rlinf_actors.worker.template_socket import TemplateSocket


@pytest.fixture
def ends():
    template, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with template, worker:
        yield template, worker


async def test_the_end_of_the_template_is_told_once_after_its_last_packets(ends):
    template, worker = ends
    loop, said = asyncio.get_running_loop(), []
    ended = loop.create_future()
    control = TemplateSocket(worker, lambda: ended.set_result(list(said)))
    control.serve(template_protocol.DevicesLocked, said.append)
    control.listen(loop)
    template.send(template_protocol.encode(template_protocol.DevicesLocked("w", 1)))
    template.close()
    assert await asyncio.wait_for(ended, 5) == [template_protocol.DevicesLocked("w", 1)]
    assert not control.try_send(template_protocol.UnlockDevices("w", 1))


async def test_posts_to_a_full_template_do_not_wait_and_follow_in_order(ends):
    template, worker = ends
    control = TemplateSocket(worker, lambda: None)
    control.listen(asyncio.get_running_loop())
    said = [template_protocol.LockDevices("w", number) for number in range(2000)]
    for packet in said:
        control.post(packet)
    came = [await asyncio.to_thread(template.recv, 1024) for _ in said]
    assert [template_protocol.decode_to_agent(data) for data in came] == said
    asyncio.get_running_loop().remove_reader(worker.fileno())
