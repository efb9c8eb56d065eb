"""A robot worker's control socket: its guard receives, and the rest goes where it always went."""

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


async def test_guard_hands_over_packets_that_are_no_lease(ends):
    template, worker = ends
    control = TemplateSocket(worker, lambda: None)
    loop = asyncio.get_running_loop()
    served = loop.create_future()
    control.serve(template_protocol.DevicesLocked, served.set_result)
    control.listen(loop, guarded=True)
    template.send(template_protocol.encode(template_protocol.DevicesLocked("w", 1)))
    await asyncio.to_thread(lambda: control.hand_over(control.receive()))
    assert await asyncio.wait_for(served, 5) == template_protocol.DevicesLocked("w", 1)


def test_receive_returns_none_at_the_end_of_the_template_and_send_does_nothing(ends):
    template, worker = ends
    control = TemplateSocket(worker, lambda: None)
    template.close()
    assert control.receive() is None
    control.try_send(template_protocol.LeaseLost("w", "its template process ended"))


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
