"""The checks of `rlinf-actors doctor` on the facts of a machine, and on invented clusters."""

from __future__ import annotations

import dataclasses

import pytest
from cli_kit import example_status, node
from msgspec.structs import replace
from test_doctor import FACTS

from rlinf_actors.cli.doctor import cluster_checks as checks
from rlinf_actors.cli.doctor import node_checks as doctor_node_checks
from rlinf_actors.cli.doctor.cluster import Asking, ClockOffset, ClusterFacts, End, Path, in_rounds, ring_and_star
from rlinf_actors.wire.check_values import Holder, Interface, Interpreter, LogUse, PathAnswer, Transfer
from rlinf_actors.wire.figure_values import DiskFigures
from rlinf_actors.wire.key_messages import KeyLimits, Keys, KeyState


def logs(free: int, last_hour: int = 0) -> LogUse:
    return LogUse(DiskFigures("logs", "/var/log/w", 100 << 30, free), 3 << 30, last_hour, 7)


@pytest.mark.parametrize(
    ("change", "check", "status", "text", "fix"),
    [
        ({"shared_memory": []}, "dev_shm", "warn", "no /dev/shm", "mount -t tmpfs"),
        ({"shared_memory": [1 << 20, 1 << 20]}, "dev_shm", "warn", "1 MiB of 1 MiB", "remount,size=8G"),
        ({"open_files": (64, 128)}, "open_files", "fail", "at most 128", "ulimit -Hn 65536"),
        ({"open_files": (256, 1024)}, "open_files", "warn", "about 137 workers", "LimitNOFILE"),
        ({"locked_memory": 65536, "accelerators": 8}, "locked_memory", "warn", "RDMA", "ulimit -l unlimited"),
        ({"locked_memory": 65536}, "locked_memory", "pass", "0 MiB", ""),
        ({"real_time": 0, "robots": 1}, "real_time", "warn", "libfranka", "LimitRTPRIO=99"),
        ({"real_time": 0}, "real_time", "pass", "only robots", ""),
        ({"clock_synchronized": False}, "clock", "warn", "not synchronized", "set-ntp"),
        ({"clock_synchronized": None}, "clock", "pass", "not known", ""),
        ({"ptrace_scope": 2}, "ptrace", "warn", "ptrace_scope is 2", "sysctl kernel.yama.ptrace_scope=1"),
        ({"ptrace_scope": 2, "traces_all": True}, "ptrace", "pass", "works", ""),
        ({"ptrace_scope": 3, "traces_all": True}, "ptrace", "warn", "ptrace_scope is 3", "boots again"),
        ({"py_spy": ""}, "ptrace", "pass", "not installed", ""),
        ({"logs": logs(50 << 30)}, "logs", "pass", "50.0 GiB of 100.0 GiB free; 7 log files have 3.0 GiB", ""),
        ({"logs": logs(50 << 20)}, "logs", "fail", "is lost soon", "du -ah /var/log/w"),
        ({"logs": logs(900 << 20)}, "logs", "warn", "900 MiB", "log_total_max_gb"),
        ({"logs": logs(10 << 30, 5 << 30)}, "logs", "warn", "the disk is full in 2 h", "du -ah"),
        ({"holders": [Holder(3, 7, 1 << 30, "ended")]}, "gpu_holders", "warn", "process 7 has ended and still holds "
         "1.0 GiB of GPU 3", "fuser -v /dev/nvidia3"),
        ({"holders": [Holder(0, 7, 0, "orphan", "python")]}, "gpu_holders", "warn", "process 7 (python) of a worker "
         "that is gone holds memory of GPU 0", "kill -9 7"),
        ({"holders": [Holder(0, 7, 1, "worker"), Holder(0, 8, 1, "hidden")]}, "gpu_holders", "pass",
         "workers: 1, and others: 1", ""),
        ({"faults": ["NVML hangs"]}, "unknown", "warn", "NVML hangs", "dmesg"),
        ({"cgroup": "", "cgroup_why": {"cgroup": "start agentd so"}}, "cgroup", "warn", "no cgroup", "start agentd so"),
        ({"cgroup_why": {"memory": "enable it"}}, "memory_limit", "warn", "cannot hold", "enable it"),
    ],
)  # fmt: skip
def test_each_problem_of_a_machine_has_its_status_and_fix(change, check, status, text, fix):
    every = [one for row in doctor_node_checks.OF_NODES for one in row.run(replace(FACTS, **change))]
    (finding,) = [one for one in every if one.check == check]
    assert finding.status == status
    assert text in finding.text
    assert fix in finding.fix if fix else not finding.fix


# --- clusters ---


def interface(ip: str, name: str = "eth0", mtu: int = 1500, **more) -> Interface:
    return Interface(name, ip, 24, mtu=mtu, **more)


def cluster(count: int = 3, **changes) -> ClusterFacts:
    """Nodes n0, n1, …, with the same facts but for their addresses."""
    nodes = [placed(rank) for rank in range(count)]
    facts = {f"id-n{rank}": replace(FACTS, interfaces=[interface(f"10.0.0.{rank + 1}")]) for rank in range(count)}
    clocks = {id: ClockOffset(5.0, 0.001) for id in facts}
    return dataclasses.replace(ClusterFacts(nodes, facts, clocks=clocks), **changes)


def placed(rank: int):
    one = node(rank)
    return replace(one, report=replace(one.report, host=f"h{rank}"))


def end(rank: int, interface: str = "", mbit_s: int = 0) -> End:
    return End(f"n{rank}", f"id-n{rank}", f"10.0.0.{rank + 1}", interface, mbit_s)


def path(near: int, far: int, there: float = 9e9, back: float = 9e9, mbit_s: int = 0) -> Path:
    """A path with so many bits in a second in each direction."""
    answer = PathAnswer(
        source=f"10.0.0.{near + 1}", there=Transfer(int(there / 8), 1.0), back=Transfer(int(back / 8), 1.0), rtt_s=2e-4
    )
    return Path(end(near, mbit_s=mbit_s), end(far, mbit_s=mbit_s), answer, True, True)


def lost(there: bool, back: bool) -> Path:
    return Path(end(0), end(1), PathAnswer(fault="no answer in 2 s", kind="timeout"), there, back)


def bad(facts: ClusterFacts) -> list:
    return [one for one in checks.diagnose_cluster(facts) if one.status != "pass"]


def test_a_good_cluster_passes_and_its_paths_are_shown():
    found = checks.diagnose_cluster(cluster(paths=[path(0, 1), path(1, 2), path(2, 0)]))
    assert {one.status for one in found} == {"pass"}
    text = "n0 (eth0, 10.0.0.1) to n1 (eth0, 10.0.0.2): 9.0 Gbit/s there, 9.0 Gbit/s back, round trip 0.20 ms"
    assert text in [one.text for one in found]
    assert "the nodes' clocks differ by at most 0 ms" in [one.text for one in found]


@pytest.mark.parametrize(
    ("found", "status", "text", "fix"),
    [
        (lost(False, True), "fail", "packets from n0 (eth0, 10.0.0.1) to n1 (eth0, 10.0.0.2) are lost; the other "
         "direction works", "on n1: nft list ruleset (or iptables -L INPUT) must admit 10.0.0.1; on n0: `ip route get"),
        (lost(True, False), "fail", "packets from n1 (eth0, 10.0.0.2) to n0 (eth0, 10.0.0.1) are lost", "on n0: nft"),
        (lost(False, False), "fail", "no packets arrive between n0 (eth0, 10.0.0.1) and n1", "cables"),
        (lost(True, True), "fail", "arrive in both directions, but no connection", "stateful firewall"),
        (Path(end(0), end(1), PathAnswer(fault="the connection was refused", kind="refused")), "fail",
         "no connection from n0 (eth0, 10.0.0.1) to n1 (eth0, 10.0.0.2): the connection was refused", "firewalls"),
        (path(0, 1, 1e9, 9e9), "warn", "n0 (eth0, 10.0.0.1) to n1 (eth0, 10.0.0.2) is slow: 1.0 Gbit/s; the opposite "
         "direction has 9.0 Gbit/s", "ethtool"),
        (path(0, 1, 9e9, 1e9), "warn", "n1 (eth0, 10.0.0.2) to n0 (eth0, 10.0.0.1) is slow: 1.0 Gbit/s", "of n0"),
        (path(0, 1, 1e9, 0.9e9, 10_000), "warn", "its link has 10.0 Gbit/s", "duplex"),
    ],
)  # fmt: skip
def test_a_broken_or_slow_direction_is_named(found, status, text, fix):
    findings = [one for one in checks.paths(cluster(paths=[found])) if one.status != "pass"]
    assert findings[0].status == status
    assert text in findings[0].text
    assert fix in findings[0].fix


def test_a_path_slower_than_most_is_named_in_both_directions():
    paths = [path(0, 1), path(1, 2), path(2, 0, 1e9, 1e9)]
    texts = [one.text for one in checks.paths(cluster(paths=paths)) if one.status == "warn"]
    assert len(texts) == 2
    assert all("half of the directions have 9.0 Gbit/s or more" in text for text in texts)


def test_many_good_paths_have_one_line():
    paths = [path(n, n + 1) for n in range(9)]
    (finding,) = checks.paths(cluster(10, paths=paths))
    assert finding.text == "9 paths have 9.0 Gbit/s to 9.0 Gbit/s, in the middle 9.0 Gbit/s"


def test_a_different_version_is_named_with_its_node_and_a_fix():
    facts = cluster()
    own = Interpreter("/venv/bin/python", "3.11.7", {"torch": "2.9", "numpy": "2.0"}, own=True)
    other = Interpreter("/venv/bin/python", "3.11.9", {"torch": "2.8", "numpy": ""}, own=True)
    job = Interpreter("/job/bin/python", "3.11", {"torch": "2.9", "numpy": "2.0", "lerobot": "0.4"})
    for id, interpreters in zip(facts.facts, ([own, job], [own], [other]), strict=True):
        facts.facts[id] = replace(facts.facts[id], interpreters=interpreters)
    found = {one.text: one.fix for one in bad(facts)}
    assert found == {
        "torch differs: 2.8 on n2; 2.9 on n0, n0 (/job/bin/python), n1": "on n2: python -m pip install torch==2.9",
        "numpy differs: none on n2; 2.0 on n0, n0 (/job/bin/python), n1": "on n2: python -m pip install numpy==2.0",
    }


def test_an_interpreter_of_jobs_that_is_agentds_own_is_a_place_only_where_it_differs():
    own = Interpreter("/p", "3.11.7", {"torch": "2.9", "numpy": "2.0"}, own=True)
    job = Interpreter("/p", "3.11", {"torch": "2.8", "numpy": "2.0"})  # started before torch was upgraded
    facts = cluster(1)
    facts.facts["id-n0"] = replace(FACTS, interpreters=[own, job])
    table = checks.table(facts)
    assert table["python"] == {"3.11.7": ["n0"]}
    assert table["numpy"] == {"2.0": ["n0"]}
    assert table["torch"] == {"2.9": ["n0"], "2.8": ["n0 (/p)"]}


def test_versions_of_the_machine_of_the_driver_count():
    own = Interpreter("/p", "3.11.7", {"numpy": "2.0"}, own=True)
    facts = cluster(1, here=replace(FACTS, interpreters=[replace(own, packages={"numpy": "1.9"})]))
    facts.facts["id-n0"] = replace(FACTS, interpreters=[own])
    (finding,) = bad(facts)
    assert finding.text == "numpy differs: 1.9 on this machine; 2.0 on n0"


def test_another_minor_version_of_python_is_named():
    facts = cluster(2)
    for id, version in zip(facts.facts, ("3.11.7", "3.12.1"), strict=True):
        facts.facts[id] = replace(facts.facts[id], interpreters=[Interpreter("/p", version, own=True)])
    (finding,) = bad(facts)
    assert finding.text == "python differs: 3.11 on n0; 3.12 on n1"


def test_clocks_are_compared_with_the_head_and_their_error_counts():
    facts = cluster()
    facts.clocks["id-n1"] = ClockOffset(3.5, 0.001)
    facts.clocks["id-n2"] = ClockOffset(5.5, 0.5)
    (finding,) = bad(facts)
    assert "the clock of node n1 is 1.50 s behind that of the head's node" in finding.text


def test_states_of_nodes_and_silent_ones_are_findings():
    facts = cluster(faults={"id-n2": "it is silent"})
    del facts.facts["id-n2"], facts.clocks["id-n2"]
    nodes = [facts.nodes[0], replace(facts.nodes[1], state="lost", last_seen_s=30.0), facts.nodes[2]]
    found = [(one.status, one.nodes) for one in bad(dataclasses.replace(facts, nodes=nodes))]
    assert found == [("fail", ("n1",)), ("warn", ("n2",))]


def test_interfaces_with_errors_and_different_mtus_are_named():
    facts = cluster(2)
    facts.facts["id-n1"] = replace(
        FACTS, interfaces=[interface("10.0.0.2", mtu=9000), interface("10.1.0.2", "ib0", up=False, sent_errors=3)]
    )
    texts = [one.text for one in bad(dataclasses.replace(facts, paths=[path(0, 1)]))]
    assert texts == [
        "node n1: the link of ib0 (10.1.0.2) is down",
        "node n1: ib0 had 0 receive and 3 send errors",
        "n0 and n1 have different MTUs: 1500 on n0 (eth0); 9000 on n1 (eth0)".replace(";", ","),
    ]


def test_a_problem_of_several_nodes_is_said_once():
    facts = cluster()
    for id in ("id-n0", "id-n2"):
        facts.facts[id] = replace(facts.facts[id], open_files=(64, 64))
    (finding,) = bad(facts)
    assert finding.text == "nodes n0, n2: at most 64 open files; 256 are the least"
    assert finding.nodes == ("n0", "n2")


def test_keys_near_their_end_and_open_tokens_are_shown():
    day = 86400.0
    old, ending = KeyState("a", "agent", "n1", 0.0, "kim"), KeyState("b", "driver", "ann", 390 * day, "kim")
    token = KeyState("c", "agent", "n7", 399 * day, "kim", token=True, expires_at=400 * day + 600)
    ending = replace(ending, limits=KeyLimits(until=403 * day))
    facts = cluster(keys=Keys([old, ending, token, replace(old, ended_at=1.0)], "h", [], 400 * day))
    found = [(one.text, one.fix) for one in bad(facts)]
    assert found == [
        ("the key of node n1 is 400 d old", "as n1: rlinf-actors keys rotate"),
        ("the key of driver ann ends in 3 d", "on the head's machine: rlinf-actors keys enroll ann --driver --replace"),
    ]
    facts = cluster(keys=Keys([token], "h", [], 400 * day))
    assert "0 keys and 1 open join token (of n7; the last ends in 10 min)" in [one.text for one in checks.keys(facts)]


def test_paths_grow_with_the_nodes_and_no_node_has_two_at_a_time():
    facts = cluster(10)
    paths = ring_and_star(facts.nodes, facts.facts)
    assert len(paths) == 10 + 7
    assert len(paths) == len({frozenset((near.id, far.id)) for near, far in paths})
    for some in in_rounds(paths):
        ids = [one.id for ends in some for one in ends]
        assert len(ids) == len(set(ids))
    assert sum(map(len, in_rounds(paths))) == len(paths)
    assert len(ring_and_star(facts.nodes[:2], facts.facts)) == 1


def test_each_common_network_is_tested_and_a_bridge_of_containers_is_not():
    facts = cluster(2)
    for rank, id in enumerate(facts.facts):
        more = [interface(f"10.9.0.{rank + 1}", "ib0"), interface("172.17.0.1", "docker0")]
        facts.facts[id] = replace(FACTS, interfaces=[interface(f"10.0.0.{rank + 1}"), *more])
    paths = ring_and_star(facts.nodes, facts.facts)
    assert [(near.interface, near.ip, far.interface, far.ip) for near, far in paths] == [
        ("", "10.0.0.1", "eth0", "10.0.0.2"), ("ib0", "10.9.0.1", "ib0", "10.9.0.2")
    ]  # fmt: skip


def test_agentds_of_one_machine_have_no_path():
    facts = cluster(2)
    nodes = [replace(one, report=replace(one.report, host="same")) for one in facts.nodes]
    assert ring_and_star(nodes, facts.facts) == []


async def test_a_cluster_on_one_machine_says_why_no_path_was_tested():
    facts = cluster(2)
    nodes = [replace(one, report=replace(one.report, host="same")) for one in facts.nodes]
    asking = Asking(None, replace(example_status(), nodes=nodes))  # type: ignore[arg-type]  # nothing is asked
    asking.facts = facts.facts
    untested = await asking.test_paths()
    texts = [one.text for one in checks.diagnose_cluster(dataclasses.replace(facts, untested=untested))]
    assert "paths between nodes: none was tested, because all nodes are on one machine" in texts


def test_one_interface_is_counted_as_one():
    texts = [one.text for one in checks.diagnose_cluster(cluster(1))]
    assert "1 network interface is up and has no errors" in texts
