"""Keys from their first day to their last, with real processes over CURVE on loopback."""

from __future__ import annotations

import os
import select

import pytest
from keyed_cluster import keyed_cluster

from rlinf_actors.security import keyfile

pytestmark = [pytest.mark.live, pytest.mark.timeout(90)]


@pytest.fixture
def cluster():
    with keyed_cluster() as made:
        yield made


def gone(pid: int) -> None:
    """Back when a process has ended that is not our child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watch], [], [], 30)[0], f"process {pid} is still there"
    finally:
        os.close(watch)


def test_a_node_and_a_driver_join_by_tokens_work_together_and_are_thrown_out(cluster):
    token = cluster.token("n1")
    cluster.keys("join", token, "--dir", cluster.keys_of("n1"), at="n1")
    again = cluster.cli("keys", "join", token, "--dir", cluster.keys_of("thief"), at="thief", code=77)
    assert "refused" in again.stderr
    assert not os.path.exists(cluster.keys_of("thief") + "/agent.key")
    assert "was used for key" in cluster.until("refused", "join token of agent 'n1'")
    cluster.agentd("n1", "--connect", cluster.address)
    cluster.join("ann", "--driver")

    ann = cluster.driver("ann", "2", "job", "pids")
    pids = [int(pid) for pid in ann.line().split()]
    assert len(pids) == 2

    # another driver sees the nodes, and nothing of ann's
    cluster.join("bob", "--driver")
    seen = [line for line in cluster.cli("groups", "--json", at="bob").stdout.split() if "pids" in line]
    assert seen == []
    assert "pids" in cluster.cli("groups", at="ann").stdout
    thief = cluster.driver("bob", "2", "job", "pids2")
    assert thief.line() == "AuthenticationError"
    assert "it is the job of driver 'ann'" in thief.end()[1]
    assert "may not say RevokeKey" in cluster.cli("keys", "revoke", "ann", at="bob", code=77).stderr

    cluster.keys("revoke", "n1")
    cluster.until("node_lost", "node n1", "revoked it")
    gone(pids[1])
    assert ann.line() == "WorkerDiedError"
    code, err = ann.end()
    assert code == 3
    assert "its key is not good any more" in err


def test_revoking_a_driver_s_key_ends_it_and_its_workers(cluster):
    cluster.join("ann", "--driver")
    ann = cluster.driver("ann", "1", "job", "pids")
    (pid,) = (int(pid) for pid in ann.line().split())
    cluster.keys("revoke", "ann")
    assert ann.line().endswith("Error")
    code, err = ann.end()
    assert code == 3
    assert "revoked it" in err
    gone(pid)
    refused = cluster.driver("ann", "1", "job", "pids")
    assert refused.line() == "AuthenticationError"
    cluster.until("refused", "key of driver 'ann'", "revoked it")


def test_a_node_changes_its_key_and_goes_on(cluster):
    cluster.node("n1")
    old = keyfile.load(cluster.place / "n1" / "agent.key")
    new = cluster.keys("rotate", at="n1")
    assert new["public"] == keyfile.load(cluster.place / "n1" / "agent.key").pair.public != old.pair.public
    states = {key["public"]: key["state"] for key in cluster.keys("list")["keys"]}
    assert (states[old.pair.public], states[new["public"]]) == ("retiring", "good")
    again = cluster.agentd("n1", "--connect", cluster.address)  # as the next incarnation, with the new key
    assert "node_id" in again.said


def test_the_local_driver_and_the_unix_socket_need_no_enrolment(cluster):
    kim = cluster.driver("head", "1", "job", "pids")
    assert kim.line().isdigit()
    by_socket = cluster.cli("keys", "list", "--head", str(cluster.place / "r-head"), at="nobody")
    assert "kim" in by_socket.stdout
