"""Lying members: for any well-formed messages, the head does not fail and its answers stay valid."""

from __future__ import annotations

import math
import sys
import typing
from pathlib import Path

import msgspec
import pace
import pytest
from head_status import status_of
from lies import Liar

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.head.commands import Answer, Command, Notify, Refuse
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.agent_messages import AgentHello, Beat, ClientHello, StopWorkers, Welcome
from rlinf_actors.wire.client_messages import FindGroup, Launched, StopGroup
from rlinf_actors.wire.control_codec import Body, Notice
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint

sys.path.append(str(Path(__file__).parents[1] / "head"))  # its kit

from head_kit import HeadKit, agent_hello, client_hello, job_key, running, specs
from keys_kit import two_jobs

NAMES = ("ns", "g", "d1", "n0", "n1", "n0-1", "g-0", "g-1", "driver", "worker", "127.0.0.1", "host-n0")
LIARS = 100 * pace.rounds
EXTREMES = 0.02
"""Part of the values in their messages that are as long as their bounds allow."""
TICKS = 2000
"""The limit of ticks in 15 s; a head that needs more spins."""


def random_message(liar: Liar) -> Body | None:
    """A random message that the decoder accepts, or None."""
    kind = liar.random.choice(typing.get_args(Body))
    try:
        body = control_codec.decode(b"\x82\xa4type\xa3not\xa4body" + liar.say(kind)).body
    except RemoteWireError:
        return None
    if isinstance(body, (AgentHello, ClientHello)):
        body = msgspec.structs.replace(body, protocol=PROTOCOL, version="1.0")
    return body


def send_random_message(kit: HeadKit, liar: Liar, *peers: str) -> Body | None:
    """Let one of *peers* send a random message; return it, or None if it could not be sent."""
    body = random_message(liar)
    if body is not None:
        peer = liar.random.choice(peers)
        (kit.ask if liar.random.random() < 0.6 else kit.tell)(peer, body)
        check_encodable(kit.out)
    return body


def check_encodable(commands: list[Command]) -> None:
    """Check that the head's messages can be encoded and decoded."""
    for command in commands:
        if isinstance(command, (Notify, Answer)):
            control_codec.decode(control_codec.encode(Notice(command.body)))


def pass_time(kit: HeadKit, seconds: float) -> None:
    end, ticks = kit.now + seconds, 0
    while kit.head.next_deadline() <= end:
        deadline = kit.head.next_deadline()
        kit.wait(max(0.0, deadline - kit.now)) if deadline > kit.now else kit.stall(0.0)
        check_encodable(kit.out)
        ticks += 1
        assert ticks < TICKS, f"a deadline that has come stays: {deadline} at {kit.now}"
    kit.now = end


@pytest.mark.model
@pytest.mark.parametrize("first", range(0, LIARS, 50))
def test_no_message_makes_the_head_fail_or_spin(first):
    heard = 0
    for seed in range(first, first + 50):
        liar = Liar(seed, NAMES, EXTREMES)
        kit = HeadKit()
        kit.cluster(2)
        kit.launch("g", [0, 1])
        kit.ready("a:n0", "g-0")
        for _ in range(4):
            heard += send_random_message(kit, liar, "a:n0", "d1", "x") is not None
            assert not math.isnan(kit.head.next_deadline())
            pass_time(kit, 15.0)
        control_codec.decode(control_codec.encode(Notice(status_of(kit.head, kit.now))))
    assert heard > 50


@pytest.mark.model
@pytest.mark.parametrize("first", range(0, LIARS, 100))
def test_random_messages_of_others_do_not_affect_a_job(first):
    """The others are the agent of a node without the job's workers, another driver, and that driver's worker."""
    heard = 0
    for seed in range(first, first + 100):
        liar = Liar(seed, (*NAMES, "ann", "bob", "n2", "n1-1", "h-0", "x"), EXTREMES)
        kit = two_jobs()
        kit.give("a:n2", "b", "n2")
        kit.ask("a:n2", agent_hello("n2", ip="10.0.0.3"))
        kit.launch("h", [0], "bob", "bob")
        kit.keyed["x"] = job_key("token2")
        kit.ask("x", client_hello("x", role="worker", namespace="bob", worker_id="h-0", token="token2"))
        for _ in range(6):
            body = send_random_message(kit, liar, "a:n2", "bob", "x")
            heard += body is not None
            assert not [stop.ids for stop in kit.sent(StopWorkers) if not {"g-0", "g-1"}.isdisjoint(stop.ids)], body
            for honest in ("a:n0", "a:n1", "ann"):
                kit.tell(honest, Beat(honest))
        status = status_of(kit.head, kit.now)
        assert {(group.namespace, group.state) for group in status.groups if group.name == "g"} >= {("ann", "starting")}
        assert {"n0", "n1"} <= {node.report.node_id for node in status.nodes if node.state == "ready"}
        assert kit.head.admit(job_key("token1"), kit.wall), "the key is valid"
        assert isinstance(kit.ask("ann", FindGroup("ann", "g")), Launched)
    assert heard > 100


@pytest.mark.model
@pytest.mark.parametrize("first", range(0, LIARS, 100))
def test_random_messages_to_a_restarted_head_do_not_affect_a_job(first):
    for seed in range(first, first + 100):
        liar = Liar(seed, (*NAMES, "ann", "bob", "n2", "n1-1", "x"), EXTREMES)
        kit = two_jobs()
        kit.give("a:n2", "b", "n2")
        kit.ask("a:n2", agent_hello("n2", ip="10.0.0.3"))
        kit.restart()
        kit.ask("a:n2", agent_hello("n2", ip="10.0.0.3"))
        kit.ask("bob", client_hello("bob", namespace="bob", token="token2"))
        for _ in range(6):
            send_random_message(kit, liar, "a:n2", "bob")
        there = [running(spec, "ann", endpoint=Endpoint("h", "ipc://x"), pid=7) for spec in specs("g", [0, 1], "ann")]
        there = [msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, token="token1")) for one in there]
        for n in range(2):
            hello = agent_hello(f"n{n}", is_head=n == 0, workers=[there[n]])
            assert isinstance(kit.ask(f"a:n{n}", hello), Welcome)
            assert not kit.sent(StopWorkers, f"a:n{n}")
        assert isinstance(kit.ask("ann", client_hello("ann", namespace="ann", token="token1")), Welcome)
        pass_time(kit, 0.0)
        found = kit.ask("ann", FindGroup("ann", "g"))
        assert isinstance(found, Launched)
        assert [(worker.id, worker.state) for worker in found.group.workers] == [("g-0", "running"), ("g-1", "running")]


def test_connection_belongs_to_one_node():
    kit = HeadKit()
    kit.cluster(2)
    refused = kit.ask("a:n0", agent_hello("n1", "n1-2"))
    assert isinstance(refused, Refuse)
    assert "this connection is node" in refused.text
    kit.wait(60.0)
    assert kit.node_states() == {"n0": "lost", "n1": "lost"}


def test_connection_belongs_to_one_client():
    kit = HeadKit()
    kit.driver("d1")
    refused = kit.ask("d1", client_hello("d2"))
    assert isinstance(refused, Refuse)
    assert "this connection is" in refused.text


@pytest.mark.parametrize("grace", [math.nan, -math.inf])
def test_grace_that_no_timer_accepts_raises_a_wire_error(grace):
    with pytest.raises(RemoteWireError):
        control_codec.decode(control_codec.encode(Notice(StopGroup("ns", "g", grace))))


def test_invalid_restart_policy_raises_a_wire_error():
    policy = {"max_restarts": -1, "within_s": 1.0, "backoff_s": 0.5, "backoff_max_s": 1.0}
    spec = {"id": "w", "group": "g", "namespace": "ns", "rank": 0, "world_size": 1, "node_rank": 0, "env": {}}
    launch = {"type": "Launch", "namespace": "ns", "group": "g", "cls": "C", "workers": [{**spec, "restart": policy}]}
    with pytest.raises(RemoteWireError, match="max_restarts"):
        control_codec.decode(msgspec.msgpack.encode({"type": "not", "body": launch}))
