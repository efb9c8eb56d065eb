"""Clients that watch other clients of their job are notified of their ends, even across a restart of the head."""

from __future__ import annotations

from head_kit import HeadKit

from rlinf_actors.wire.agent_messages import Goodbye
from rlinf_actors.wire.client_messages import ClientGone, WatchClients


def watching(*incarnations):
    kit = HeadKit()
    kit.driver("host")
    kit.driver("d1")
    kit.tell("host", WatchClients(list(incarnations)))
    return kit


def test_end_of_a_client_is_reported_once():
    kit = watching("d1")
    assert kit.sent(ClientGone) == []
    kit.tell("d1", Goodbye())
    assert kit.sent(ClientGone, "host") == [ClientGone("d1")]
    kit.wait(30)
    assert kit.sent(ClientGone) == []


def test_earlier_end_is_reported_at_once():
    kit = HeadKit()
    kit.driver("host")
    kit.driver("d1")
    kit.tell("d1", Goodbye())
    kit.tell("host", WatchClients(["d1"]))
    assert kit.sent(ClientGone, "host") == [ClientGone("d1")]


def test_unknown_client_has_one_lease_to_return_to_a_new_head():
    kit = HeadKit(lease_s=10)
    kit.driver("host", pid_start=0)
    kit.tell("host", WatchClients(["back", "gone"]))
    kit.wait(9)
    kit.driver("host")
    kit.driver("back")
    kit.wait(1)
    assert kit.sent(ClientGone, "host") == [ClientGone("gone")]
    kit.tell("back", Goodbye())
    assert kit.sent(ClientGone, "host") == [ClientGone("back")]


def test_a_worker_client_ends_with_its_worker():
    kit = HeadKit()
    kit.cluster()
    token = kit.launch("g", [0]).group.token
    kit.driver("w", role="worker", worker_id="g-0", token=token)
    kit.tell("d1", WatchClients(["w"]))
    kit.exited("a:n0", "g-0")
    assert kit.sent(ClientGone, "d1") == [ClientGone("w")]


def test_clients_of_another_namespace_are_not_watched():
    kit = HeadKit()
    kit.driver("host")
    kit.driver("d1", namespace="else")
    kit.tell("host", WatchClients(["d1"]))
    kit.tell("d1", Goodbye())
    assert kit.sent(ClientGone) == []


def test_a_watcher_that_has_ended_is_forgotten():
    kit = watching("d1")
    kit.tell("host", Goodbye())
    kit.tell("d1", Goodbye())
    assert kit.sent(ClientGone) == []
