"""Keys from their first day to their last, with real processes over CURVE on loopback."""

from __future__ import annotations

import subprocess
import sys

import pace
import pytest
from keyed_cluster import gone, keyed_cluster

from rlinf_actors.errors import AuthenticationError
from rlinf_actors.security import keyfile
from rlinf_actors.wire.client_messages import GetStatus, Status
from rlinf_actors.wire.key_messages import RevokeKey

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster():
    with keyed_cluster() as made:
        yield made


def test_join_token_can_be_used_once(cluster):
    token = cluster.token("n1")
    cluster.keys("join", token, at="n1")
    again = cluster.cli("keys", "join", token, at="thief", code=77)
    assert "refused this join token of agent 'n1': it was used already, has expired" in again.err
    assert not (cluster.folder("thief") / "agent.key").exists()
    assert "was used for key" in cluster.until("refused", "join token of agent 'n1'")


def test_node_works_until_its_key_is_revoked(cluster):
    cluster.node("n2")
    cluster.join("ann", "--driver")
    ann = cluster.driver("ann", "2", "ann-job", "pids")
    first, second = (int(pid) for pid in ann.line().split())

    cluster.join("bob", "--driver")
    seen = {name: cluster.ask(GetStatus(), at=name) for name in ("ann", "bob")}
    assert {name: [group.name for group in status.groups] for name, status in seen.items()} == {
        "ann": ["pids"], "bob": []
    }  # fmt: skip
    thief = cluster.driver("bob", "1", "ann-job", "more")
    assert thief.line() == "AuthenticationError"
    assert "it is the job of driver 'ann'" in thief.end()[1]
    with pytest.raises(AuthenticationError, match="driver 'bob' may not say RevokeKey"):
        cluster.ask(RevokeKey("ann", "bob"), at="bob")

    cluster.keys("revoke", "n2")
    cluster.until("node_lost", "node n2", "revoked it")
    gone(second)
    assert ann.line() == "NodeLostError"
    code, err = ann.end()
    assert code == 3
    assert "node n2 (127.0.0.1) knows its token" in err
    gone(first)


def test_revoked_key_ends_its_driver_and_workers(cluster):
    cluster.join("eve", "--driver")
    eve = cluster.driver("eve", "1", "eve-job", "pids")
    pid = int(eve.line())
    cluster.keys("revoke", "eve")
    assert eve.line().endswith("Error")
    code, err = eve.end()
    assert code == 3
    assert "revoked it" in err
    gone(pid)
    with pytest.raises(AuthenticationError):
        cluster.ask(GetStatus(), at="eve")
    cluster.until("refused", "key of driver 'eve'", "revoked it")


def test_node_can_change_its_key_and_the_old_key_stays_valid_for_a_while(cluster):
    before = cluster.node("n3")
    old = keyfile.load(cluster.folder("n3") / "agent.key")
    new = cluster.keys("rotate", at="n3")
    assert new["public"] == keyfile.load(cluster.folder("n3") / "agent.key").pair.public != old.pair.public
    states = {key["public"]: key["state"] for key in cluster.keys("list")["keys"]}
    assert (states[old.pair.public], states[new["public"]]) == ("retiring", "good")
    assert before.process.poll() is None
    before.end()
    assert "node_id" in cluster.agentd("n3", "--connect", cluster.address).said


def test_heads_machine_needs_no_enrolment(cluster):
    assert cluster.driver("head", "1", "kim-job", "pids").line().isdigit()
    assert "kim" in cluster.cli("keys", "list", "--head", str(cluster.place / "r-head"), at="nobody").out


def test_process_without_a_key_gets_an_error_that_says_so(cluster):
    nobody = cluster.driver("nobody", "1", "job", "pids")
    assert nobody.line() == "AuthenticationError"
    with pytest.raises(AuthenticationError):
        cluster.ask(GetStatus(), at="nobody")


def states(cluster):
    status = cluster.ask(GetStatus())
    assert isinstance(status, Status)
    return status


def test_restarted_head_knows_its_keys_and_the_owners_of_jobs(cluster):
    cluster.join("gail", "--driver")
    gail = cluster.driver("gail", "1", "gail-job", "pids")
    assert gail.line().isdigit()
    before = {key["public"]: key["state"] for key in cluster.keys("list")["keys"]}
    cluster.head.process.kill()
    cluster.head.process.wait()
    thief = cluster.driver("head", "1", "gail-job", "more")
    cluster.head = cluster.agentd("head", "--head", "--listen", cluster.address)
    assert {key["public"]: key["state"] for key in cluster.keys("list")["keys"]} == before
    # its event log has gail's first registration too, so an event does not tell that gail is back
    assert pace.again_like(lambda: "gail-job" in {one.namespace for one in states(cluster).drivers}, True)
    status = cluster.ask(GetStatus(), at="gail")
    assert isinstance(status, Status)
    assert [(group.name, group.state) for group in status.groups] == [("pids", "running")]
    assert thief.line() == "AuthenticationError"
    cluster.keys("revoke", "gail")
    assert gail.end()[0] == 3


def test_new_head_key_is_accepted_after_the_trust_command(cluster):
    cluster.join("hal", "--driver")
    cluster.join("n5")
    new = cluster.keys("rotate", "--role", "head")
    cluster.head.end()
    cluster.head = cluster.agentd("head", "--head", "--listen", cluster.address)
    assert "does not have the key that is expected" in cluster.cli("status", at="hal", code=77).err
    told = f"this is not the head, at tcp://{cluster.address}"
    hal = cluster.driver("hal", "1", "hal-job", "pids")
    assert (hal.line(), told in hal.end()[1]) == ("AuthenticationError", True)
    command = [
        sys.executable,
        "-m",
        "agentd",
        "--connect",
        cluster.address,
        "--hardware",
        str(cluster.place / "hw.json"),
    ]
    command += ["--run-dir", str(cluster.place / "r-n5")]
    with subprocess.Popen(command, env=cluster.env("n5"), stderr=subprocess.PIPE, text=True) as agentd:
        assert agentd.stderr is not None
        assert any(f"not registered yet: {told}" in line for line in agentd.stderr)
        agentd.terminate()  # agentd keeps trying
        assert agentd.wait(pace.PATIENCE_S) == 0
    cluster.keys("trust", new["public"], at="hal")
    assert isinstance(cluster.ask(GetStatus(), at="hal"), Status)
