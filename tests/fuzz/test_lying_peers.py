"""Members who lie: whatever they say in well-formed messages, the head neither fails nor stops to make sense."""

from __future__ import annotations

import math
import sys
import typing
from pathlib import Path

import msgspec
import pytest
from lies import Liar

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.head.commands import Answer, Command, Notify, Refuse
from rlinf_actors.wire import codec
from rlinf_actors.wire.clients import StopGroup
from rlinf_actors.wire.messages import Body, Notice
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.session import AgentHello, ClientHello

sys.path.append(str(Path(__file__).parents[1] / "head"))  # its kit

from head_kit import HeadKit, agent_hello, client_hello

NAMES = ("ns", "g", "d1", "n0", "n1", "n0-1", "g-0", "g-1", "driver", "worker", "127.0.0.1", "host-n0")
LIARS = 300
TICKS = 2000
"""More than 15 s of a head's deadlines ever are: it would turn in circles."""


def said(liar: Liar) -> Body | None:
    """Something that passes the door."""
    kind = liar.random.choice(typing.get_args(Body))
    try:
        body = codec.decode(b"\x82\xa4type\xa3not\xa4body" + liar.say(kind)).body
    except RemoteWireError:
        return None
    if isinstance(body, (AgentHello, ClientHello)):
        body = msgspec.structs.replace(body, protocol=PROTOCOL, version="1.0")
    return body


def check(commands: list[Command]) -> None:
    """What the head says can be said, and read."""
    for command in commands:
        if isinstance(command, (Notify, Answer)):
            codec.decode(codec.encode(Notice(command.body)))


def pass_time(kit: HeadKit, seconds: float) -> None:
    end, ticks = kit.now + seconds, 0
    while kit.head.next_deadline() <= end:
        deadline = kit.head.next_deadline()
        kit.wait(max(0.0, deadline - kit.now)) if deadline > kit.now else kit.stall(0.0)
        check(kit.out)
        ticks += 1
        assert ticks < TICKS, f"a deadline that has come stays: {deadline} at {kit.now}"
    kit.now = end


@pytest.mark.parametrize("first", range(0, LIARS, 50))
def test_no_message_makes_the_head_fail_or_turn_in_circles(first):
    heard = 0
    for seed in range(first, first + 50):
        liar = Liar(seed, NAMES)
        kit = HeadKit()
        kit.cluster(2)
        kit.launch("g", [0, 1])
        kit.ready("a:n0", "g-0")
        for _ in range(4):
            body = said(liar)
            if body is None:
                continue
            heard += 1
            peer = liar.random.choice(("a:n0", "d1", "x"))
            if liar.random.random() < 0.6:
                kit.ask(peer, body)
            else:
                kit.tell(peer, body)
            check(kit.out)
            assert not math.isnan(kit.head.next_deadline())
            pass_time(kit, 15.0)
        codec.encode(Notice(kit.head.status(kit.now)))
    assert heard > 50


def test_one_connection_is_one_nodes():
    kit = HeadKit()
    kit.cluster(2)
    refused = kit.ask("a:n0", agent_hello("n1", "n1-2"))
    assert isinstance(refused, Refuse)
    assert "this connection is node" in refused.text
    kit.wait(60.0)
    assert kit.node_states() == {"n0": "lost", "n1": "lost"}


def test_one_connection_is_one_clients():
    kit = HeadKit()
    kit.driver("d1")
    refused = kit.ask("d1", client_hello("d2"))
    assert isinstance(refused, Refuse)
    assert "this connection is" in refused.text


@pytest.mark.parametrize("grace", [math.nan, -math.inf])
def test_what_no_timer_takes_is_refused_at_the_door(grace):
    with pytest.raises(RemoteWireError):
        codec.decode(codec.encode(Notice(StopGroup("ns", "g", grace))))


def test_a_policy_that_refuses_its_values_is_a_wire_error():
    policy = {"max_restarts": -1, "within_s": 1.0, "backoff_s": 0.5, "backoff_max_s": 1.0}
    spec = {"id": "w", "group": "g", "namespace": "ns", "rank": 0, "world_size": 1, "node_rank": 0, "env": {}}
    launch = {"type": "Launch", "namespace": "ns", "group": "g", "cls": "C", "workers": [{**spec, "restart": policy}]}
    with pytest.raises(RemoteWireError, match="max_restarts"):
        codec.decode(msgspec.msgpack.encode({"type": "not", "body": launch}))
