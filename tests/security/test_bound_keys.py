"""An agent's key serves one node and user, and a live session is never taken over: real uids, real keys."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_users import OTHER_USER, THIEF, VICTIM, Agentd, Machine, machine, why_not

pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(why_not()), reason=why_not())]

REVOKED, OTHER = 61013, 61014
CLOSED = Path(__file__).with_name("closed_process.py")


@pytest.fixture(scope="module")
def here() -> Iterator[Machine]:
    with machine() as made:
        yield made


def test_copied_key_does_not_take_a_running_node_over(here: Machine) -> None:
    """Before keys were bound, the thief got the node, and the victim's agentd exited for good."""
    key = here.key_for(VICTIM, "--user", str(VICTIM))
    victim = Agentd(here, "victim", VICTIM)
    here.until("node_joined", "node n1")
    ((id, before),) = ((id, node) for id, node in here.nodes().items() if node["hostname"] == "n1")
    here.copy(key, THIEF)

    honest = Agentd(here, "honest", THIEF)
    here.until("refused", f"not for agentds of user '{THIEF}'")
    assert honest.process.wait(30) == 78
    # with --node-id and a false user: what a hostile program would say
    thief = Agentd(here, "thief", THIEF, "--node-id", id, says=str(VICTIM))
    here.until("refused", "has an agentd already")
    victim.logged("says that it is this node")
    assert (thief.process.poll(), victim.process.poll()) == (None, None)
    assert here.nodes()[id]["incarnation"] == before["incarnation"]

    victim.kill()  # while the thief tries all the time
    again = Agentd(here, "victim", VICTIM)
    here.until("node_joined", "node n1", not_=before["incarnation"])
    after = here.nodes()[id]
    assert again.process.poll() is None
    again.end()  # says goodbye: now the node is free, and whoever has the key may be it
    here.until("node_joined", "node n1", not_=after["incarnation"])
    here.admin("keys", "revoke", "n1", "--user", str(VICTIM))
    here.until("node_lost", "revoked it")
    thief.end()


def test_node_is_enrolled_by_two_commands(here: Machine) -> None:
    made = here.admin("keys", "enroll", "n2", "--address", here.address)
    assert made["command"] == f"agentd --connect {here.address} --token {made['token']}"
    for _ in range(2):  # the token in the unit or in the shell's history may be used again
        agentd = Agentd(here, "two", VICTIM, "--token", made["token"], node="n2")
        here.until("node_joined", "node n2")
        agentd.end()
        here.until("node_left", "node n2")
    (listed,) = (key for key in here.admin("keys", "list")["keys"] if (key["name"], key["state"]) == ("n2", "good"))
    assert listed["user"] == str(VICTIM)
    assert listed["node_id"]


def test_join_waits_for_a_head_that_stands_still(here: Machine) -> None:
    """Longer than a handshake may take, and than other commands wait."""
    token = here.admin("keys", "enroll", "kim2", "--driver", "--address", here.address)["token"]
    here.head.send_signal(signal.SIGSTOP)
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "keys", "join", "--dir", str(here.place / "kim2"), token]
    with subprocess.Popen(command, env=here.head_env, stderr=subprocess.PIPE, text=True) as joining:
        assert joining.stderr is not None
        try:
            assert f"waiting for the head at tcp://{here.address}" in joining.stderr.readline()
        finally:
            here.head.send_signal(signal.SIGCONT)
        _, said = joining.communicate()
    assert joining.returncode == 0, said
    key = here.place / "kim2" / "driver.key"  # on loopback it must be named
    assert f"for scripts:\nexport RLINF_ACTORS_KEY_FILE={key} RLINF_HEAD={here.address}" in said
    assert [path.name for path in (here.place / "kim2").iterdir()] == ["driver.key"]


def test_revocation_and_emergency_stop_outlive_a_reboot(here: Machine) -> None:
    """After which the run directory is empty, and the head's state is not."""
    here.key_for(REVOKED, "--user", str(REVOKED))
    agentd = Agentd(here, "revoked", REVOKED)
    here.until("node_joined", "node n1")
    here.admin("keys", "revoke", "n1", "--user", str(REVOKED))
    here.until("node_lost", "revoked it")
    agentd.end()
    here.admin("estop")
    here.head.kill()
    here.head.wait()
    shutil.rmtree(here.place / "r")
    here.head, here.seen = here.start_head(), 0
    (key,) = (key for key in here.admin("keys", "list")["keys"] if key["user"] == str(REVOKED))
    assert key["state"] == "ended"
    assert len(here.admin("status")["estop"]) == 1
    again = Agentd(here, "revoked", REVOKED)
    here.until("refused", "revoked it")
    again.end()


def test_memory_of_a_head_is_closed_to_its_own_user(here: Machine) -> None:
    """/proc/PID belongs to root, and a crash leaves no core file. Of agentd and keeper: test_mapped_users.py."""
    home = here.home(OTHER)
    arguments = ["-m", "rlinf_actors.cli.main", "head", "--listen", "127.0.0.1:0", "--json"]
    command = [sys.executable, str(OTHER_USER), str(OTHER), str(home), str(CLOSED), *arguments]
    done = subprocess.run(command, env=here.env(home), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    closed = dict.fromkeys(("mem", "environ", "maps", "fd"), "PermissionError")
    assert json.loads(done.stdout) == {**closed, "own": "open", "signal": signal.SIGABRT, "core": False}
