"""agentd as root starts the workers of each driver as the user to whom its configuration maps the driver's key."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import tempfile
from pathlib import Path

import pace
import pytest
from mapped_kit import GPUS, LAB, TIMERS, USERS, Node, why_not

from rlinf_actors import procfs
from rlinf_actors.cli.queries import observing
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.head.state_place import of_agentd
from rlinf_actors.security import keyfile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import (
    AddKey,
    DrainNode,
    EndGroup,
    EStop,
    FindGroup,
    GetEvents,
    GetKeys,
    RevokeKey,
    StopCluster,
    StopGroup,
)
from rlinf_actors.wire.node_questions import AskNode
from rlinf_actors.wire.stack_values import StackQuestion
from rlinf_actors.wire.trace_values import TraceQuestion

pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def node():
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlu-", dir="/tmp")))
        yield Node(place, stack)


@pytest.fixture(scope="module")
def drivers(node):
    return {name: node.driver(f"driver-{name[-1]}", f"job-of-{name}") for name in USERS}


@pytest.mark.parametrize("user", USERS)
def test_worker_runs_as_the_user_of_its_drivers_key(node, drivers, user):
    found = drivers[user].ask("who")
    assert isinstance(found, dict), (found, node.log())
    assert found["uids"] == [USERS[user]] * 3
    assert found["gids"] == [LAB] * 3
    assert found["groups"] == sorted([LAB, *([GPUS] * (user == "lab-a"))])
    assert {line.split()[1] for line in found["capabilities"]} == {"0" * 16}
    home = f"{node.place}/home-{user}"
    assert found["env"] == {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh", "XDG_CONFIG_HOME": None}
    assert (found["umask"], found["core"], found["dumpable"]) == (0o027, [0, 0], True)
    assert drivers[user].ask("write", f"{home}/made") == USERS[user]
    if "workers get no cgroups" not in node.log():
        assert "/rlinf-actors/" in found["cgroups"], "a cgroup of its own"


CLOSED = {"PermissionError"}


def test_code_logs_and_directory_of_a_job_belong_to_its_user(node, tmp_path):
    """Code sync, and the files that the driver writes of its workers' output (distributed_log_dir)."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data.txt").write_text("of the driver")
    config = json.dumps({"runtime": {"working_dir": "."}})
    one = node.driver("driver-b", "job-with-code", 0, config, str(tmp_path / "out"), cwd=tmp_path / "code")
    found = one.ask("here")
    assert found == {"cwd": found["cwd"], "uid": USERS["lab-b"], "files": {"data.txt": "of the driver"}}
    assert found["cwd"].startswith(f"{node.place}/home-lab-b/.cache/rlinf-actors/")
    assert one.ask("say", "hello, driver") is None

    def said() -> bool:
        return any("hello, driver" in path.read_text() for path in (tmp_path / "out").rglob("rank_0.log"))

    assert pace.again_like(said, True), "what a killed template has not read is lost"
    template, worker = procfs.stat(one.ask("who")["pid"]).parent, one.ask("who")["pid"]
    hidden = one.ask("spawn")
    watched = [os.pidfd_open(pid) for pid in (worker, hidden)]
    os.kill(template, signal.SIGKILL)
    for pidfd in watched:
        assert select.select([pidfd], [], [], pace.PATIENCE_S)[0], "what a template of a user leaves is ended"
        os.close(pidfd)
    assert "WorkerDiedError" in one.ask("who")
    one.finish()
    [out] = (tmp_path / "out").rglob("rank_0.log")
    assert out.stat().st_uid == 0, "the driver's own"


def test_next_agentd_takes_over_the_workers_of_users(node, drivers):
    pids = {user: drivers[user].ask("who")["pid"] for user in USERS}
    node.agentd.kill()
    node.agentd.wait()
    node.start()
    for user, pid in pids.items():
        assert drivers[user].ask("who")["pid"] == pid, node.log()
    assert drivers["lab-b"].ask("say", "through the next agentd") is None
    again = node.driver("driver-a", "another-job-of-a")
    found = again.ask("who")
    assert found["uids"] == [USERS["lab-a"]] * 3


def test_driver_without_a_user_is_refused_with_its_key_and_node(node, drivers):
    """By the head, before any node is asked: the launch is refused, and an event says so."""
    said = node.driver("driver-c", "job-of-nobody").answer()
    assert "AuthenticationError" in said
    assert "has no user for driver 'driver-c': users in [workers] of its agentd.toml has 'driver-a', 'driver-b'" in said
    assert "has no user for driver 'driver-c'" in node.run("events", "--kind", "refused", at="head")


def test_one_users_worker_is_closed_to_anothers(node, drivers):
    """Its memory, environment, descriptors (so its memfds), sockets, logs and files."""
    victim = drivers["lab-b"].ask("who")["pid"]
    spy = drivers["lab-a"]
    itself = spy.ask("who")["pid"]
    assert spy.ask("tries_process", itself)[f"/proc/{itself}/environ"] == "1 bytes", "the attempt itself works"
    found = spy.ask("tries_process", victim)
    assert set(found.values()) == CLOSED, found
    template = procfs.stat(victim).parent
    assert set(spy.ask("tries_process", template).values()) == CLOSED
    own, other = (Path(f"{node.run_dir}-users/{uid}") for uid in USERS.values())
    sockets = [str(path) for path in other.rglob("*") if path.is_socket()]
    assert sockets
    assert set(spy.ask("tries_sockets", sockets).values()) == CLOSED
    logs = node.place / "logs-head"
    files = [str(path) for path in (logs / "lab-b").rglob("*")]
    assert len(files) >= 2
    assert (
        set(spy.ask("tries", [str(other), str(node.place / "home-lab-b"), str(logs / "lab-b"), *files]).values())
        == CLOSED
    )
    for path, user in ((own, "lab-a"), (other, "lab-b"), (logs / "lab-a", "lab-a")):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (USERS[user], 0o700)


def test_worker_of_another_user_cannot_reach_agentd_keeper_or_keys(node, drivers):
    spy, agentd = drivers["lab-a"], node.agentd.pid
    keeper = procfs.stat(procfs.stat(spy.ask("who")["pid"]).parent).parent
    for pid in (agentd, keeper):
        assert set(spy.ask("tries_process", pid).values()) == CLOSED
    paths = [str(node.place / "head" / "head.key"), str(node.run_dir), *map(str, node.run_dir.rglob("*"))]
    assert set(spy.ask("tries", paths).values()) == CLOSED
    assert set(spy.ask("tries_sockets", [f"{node.run_dir}/head", f"{node.run_dir}/keeper"]).values()) == CLOSED


def test_users_template_reaches_no_others_through_agentd(node, drivers):
    """A user's code can act as the user's template: it says that another's process is its worker, or sends nonsense."""
    victim = drivers["lab-b"].ask("pid")
    for number, why in enumerate((f"is process {victim}, which is another user's", "not a packet for agentd")):
        options = json.dumps({"launch": {"env_vars": {"LD_OF_A_LIAR": str(number)}}})  # a template of its own
        liar = node.driver("driver-a", f"job-of-liar-{number}", 0, options)
        said = liar.ask("lies", [] if number else ["Forked", liar.ask("id"), victim])
        if said == os.strerror(errno.EPERM):
            pytest.skip("this kernel keeps a template's descriptors from its workers")
        assert "WorkerDiedError" in (liar.ask("rests") if said == "sent" else said)
        assert why in node.log()
    assert drivers["lab-b"].ask("pid") == victim
    assert node.agentd.poll() is None


def test_limits_of_a_launch_hold_for_a_users_worker(node):
    """And the user cannot change them."""
    if "unavailable" in node.log():
        pytest.skip("no cgroup with the controllers memory and pids: whether limits hold was not tried")
    limits = json.dumps({"launch": {"memory_limit": "256MiB", "pids_limit": 80}})
    one = node.driver("driver-b", "job-with-limits", 0, limits)
    found = one.ask("changes_its_limits")
    assert len(found) >= 1
    assert set(found.values()) == CLOSED
    assert 1 <= one.ask("forks", 200) < 80
    assert one.ask("takes", 16) == 16 << 20
    assert "WorkerDiedError" in one.ask("takes", 1024)


def test_agentd_follows_no_link_of_a_user_in_its_log_directory(node, drivers):
    """agentd, which is root, reads the output: a link to a file of root must not send that file to the driver."""
    spy = drivers["lab-a"]
    assert spy.ask("say", "hello from the worker") is None
    [out] = (node.place / "logs-head" / "lab-a").glob("job-of-lab-a/spy-0.out")
    secret = node.place / "secret"
    secret.write_text("of root\n" * 100)
    secret.chmod(0o600)
    folder = out.parent
    spy.ask("replace_by_link", str(folder), str(secret))
    spy.ask("say", "after the link")
    assert drivers["lab-a"].ask("say", "again") is None
    assert not any("of root" in line for line in spy.output)


def test_one_user_nodes_workers_find_no_key_and_no_token(node, drivers):
    """All of this node's workers run as agentd's user: its key came as a descriptor, tokens are in no file."""
    agentd = node.join("n1", "lab-b", f'{TIMERS}[workers]\nusers = {{ "*" = "lab-b" }}\n')
    one = node.driver("driver-c", "job-of-c", 1)
    found = one.ask("who")
    assert isinstance(found, dict), (found, node.log())
    assert found["uids"] == [USERS["lab-b"]] * 3, "which its configuration allows to all drivers"
    run = node.place / "home-lab-b" / "run-n1"
    keeper = procfs.stat(procfs.stat(one.ask("who")["pid"]).parent).parent
    for pid in (agentd.pid, keeper):
        found = one.ask("tries_process", pid)
        assert found.pop("kill") == "sent", "a worker of the same user can signal agentd"
        assert set(found.values()) == CLOSED, found
    assert set(one.ask("tries", [str(node.place / "n1" / "agent.key")]).values()) == CLOSED
    token = one.ask("token")
    assert len(token) > 20
    other = drivers["lab-a"]  # on a node of the same machine whose agentd another user runs
    assert set(other.ask("tries_process", agentd.pid).values()) == CLOSED
    assert set(other.ask("tries", [str(run), *map(str, run.rglob("*"))]).values()) == CLOSED
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".start" for path in files)
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert one.ask("tries_adoption", [str(path) for path in (run / "t").glob("*.sock")] + [f"{run}/keeper"]) == "closed"
    agentd.kill()
    agentd.wait()
    pid = one.ask("who")["pid"]
    node.spawn("n1", "lab-b", "--connect", node.address)
    assert one.ask("who")["pid"] == pid, "the next agentd has the token from the template"


def test_agentd_with_few_capabilities_needs_no_root(node, drivers):
    """As in rlinf-agentd.service without root: it has the capabilities, its templates and workers have none."""
    config = f'{TIMERS}[workers]\nusers = {{ "driver-a" = "lab-a" }}\n'
    place = node.place / "home-lab-b"
    place.chmod(0o711)
    try:
        agentd = node.join("n2", "+lab-b", config)
        rank = len(json.loads(node.run("nodes", "--json", at="head"))) - 1
        one = node.driver("driver-a", "job-on-n2", rank)
        found = one.ask("who")
        assert isinstance(found, dict), (found, node.log())
        assert found["uids"] == [USERS["lab-a"]] * 3
        assert {line.split()[1] for line in found["capabilities"]} == {"0" * 16}
        assert set(one.ask("tries_process", agentd.pid).values()) == CLOSED
        assert one.ask("say", "read by agentd") is None
        one.finish()
    finally:
        place.chmod(0o700)


async def answers(node, key, *questions):
    """Return what the head says to each question of the holder of a key file: the name of the error, or reply."""
    said = []
    async with observing(f"tcp://{node.address}", Settings(), keyfile.load(key)) as client:
        for question in questions:
            try:
                said.append(type(await client.request(question, pace.PATIENCE_S)).__name__)
            except RlinfActorsError as error:
                said.append(type(error).__name__)
    return said


def test_another_driver_and_roots_of_nodes_reach_no_job_of_others(node, drivers):
    """Neither by what the keys of another driver and of a node may ask, nor by attaching to the namespace."""
    job, spy = "job-of-lab-a", drivers["lab-a"].ask("pid")
    (node.place / "n8").mkdir(mode=0o700)
    node.run("keys", "enroll", "n8", "--file", str(node.place / "n8" / "agent.key"), at="head")
    stacks = AskNode("n8", StackQuestion(job, []))
    ends = (EndGroup(job, "spy", 0.0, "mallory"), AskNode("n8", TraceQuestion(job)), stacks)
    asked = asyncio.run(
        answers(node, node.place / "driver-b" / "driver.key", *ends, GetKeys(), RevokeKey("n8", "mallory"))
    )
    assert asked == ["AuthenticationError"] * 5
    assert "may not join job 'job-of-lab-a'" in node.driver("driver-b", job).answer()
    of_node = (
        *ends, FindGroup(job, "spy"), StopGroup(job, "spy", 0.0), GetEvents(namespace=job), StopCluster(),
        GetKeys(), RevokeKey("driver-a", "mallory"), EStop("mallory", release=True),
        AddKey(KeyPair.make().public, "driver", "driver-a", "mallory"), DrainNode(node_id(node), "mallory"),
    )  # fmt: skip
    said = asyncio.run(answers(node, node.place / "n8" / "agent.key", *of_node))
    assert said == ["AuthenticationError"] * len(of_node)
    assert drivers["lab-a"].ask("pid") == spy


def node_id(node):
    return json.loads(node.run("nodes", "--json", at="head"))[0]["id"]


async def until_event(node, text):
    """Wait until the head's event log has this text."""
    seen = 0
    async with observing(f"ipc://{node.run_dir}/head", Settings()) as client:
        while True:
            answer = await client.request(GetEvents(seen, wait_s=20.0), pace.PATIENCE_S)
            assert answer.events, node.log()
            if any(text in event.text for event in answer.events):
                return
            seen = answer.events[-1].seq


def test_two_drivers_launch_where_node_and_key_admit_them(node, drivers):
    """[admit] of a node, and the nodes of a driver's key; refusals are events and audit lines."""
    rules = f'{TIMERS}[workers]\nusers = {{ "*" = "lab-b" }}\n[admit]\n'
    agentd = node.join("n3", "lab-b", f'{rules}drivers = ["driver-a", "@arms"]\n')
    rank = len(json.loads(node.run("nodes", "--json", at="head"))) - 1
    limits = ("--nodes", "n3", "--group", "arms")
    token = json.loads(node.run("keys", "enroll", "driver-d", "--driver", *limits, "--json", at="head"))["token"]
    node.run("keys", "join", token, at="driver-d")

    admitted = node.driver("driver-a", "a-on-n3", rank)
    assert isinstance(admitted.ask("who"), dict), node.log()
    admitted.finish()
    of_group = node.driver("driver-d", "d-on-n3", rank)
    assert isinstance(of_group.ask("who"), dict), node.log()
    of_group.finish()
    elsewhere = node.driver("driver-d", "d-on-the-head", 0).answer()
    assert "none of the nodes that the key of driver 'driver-d' is limited to ('n3')" in elsewhere
    refused = node.driver("driver-b", "b-on-n3", rank).answer()
    assert "node n3 does not admit driver 'driver-b': drivers in [admit] of its agentd.toml" in refused
    assert "refused driver 'driver-b': node n3 does not" in node.run("events", "--kind", "refused", at="head")
    audit = Path(of_agentd(str(node.run_dir), False, node.env("head")), "audit", "refused.jsonl")
    assert "node n3 does not admit" in audit.read_text()

    (node.place / "n3.toml").write_text(f'{rules}drivers = ["driver-b"]\n')
    agentd.send_signal(signal.SIGHUP)
    asyncio.run(until_event(node, "has new rules; it admits 'driver-b'"))
    now = node.driver("driver-b", "b-on-n3-again", rank)
    assert isinstance(now.ask("who"), dict), node.log()
    now.finish()
