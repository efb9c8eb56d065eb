"""Whom a worker did not let in, on its way to the template."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.agent_messages import Refusal, RefusalReport
from rlinf_actors.worker.server import Strangers
from rlinf_actors.worker.template_socket import Control

pytestmark = pytest.mark.virtual_time  # else a window may be over before all of it was said


class Template:
    """The two ends of a worker's socket, which has little room."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        self._ours = ours
        self.control = Control(theirs, lambda: None)

    async def hears(self) -> template_protocol.ToAgent:
        receiving = asyncio.get_running_loop().sock_recv(self._ours, 1 << 16)
        return template_protocol.decode_to_agent(await asyncio.wait_for(receiving, 10))


@pytest.fixture
def template() -> Iterator[Template]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Template(ours, theirs)


async def test_the_first_is_told_at_once_and_the_others_by_their_number(template: Template, caplog) -> None:
    made = Strangers(asyncio.get_running_loop(), template.control.try_send)
    made.refused("a connection from 10.0.0.9: it came without a key")
    for _ in range(20):
        made.refused("a connection from 10.0.0.9: it came without a key", 2)
    for times in (1, 40):
        report = RefusalReport([Refusal("a connection from 10.0.0.9: it came without a key", times)])
        assert await template.hears() == report
    assert [record.args[1] for record in caplog.records] == [1, 11]
    made.close()


async def test_what_a_template_does_not_read_is_told_when_it_does(template: Template) -> None:
    made = Strangers(asyncio.get_running_loop(), template.control.try_send)
    while template.control.try_send(template_protocol.Pong("w", "m" * 500)):
        pass
    made.refused("somebody", 3)
    made.refused("somebody", 4)
    while isinstance(packet := await template.hears(), template_protocol.Pong):
        pass
    assert packet == RefusalReport([Refusal("somebody", 7)])
    made.close()
