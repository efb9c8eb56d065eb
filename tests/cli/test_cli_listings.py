from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from cli_kit import ENDPOINT, example_status
from msgspec.structs import replace
from terminal import terminal as narrow_terminal

from rlinf_actors.cli import output, queries
from rlinf_actors.cli.channel_command import waiter_name
from rlinf_actors.cli.process_figures import Figures
from rlinf_actors.cli.views import worker_dict
from rlinf_actors.errors import ProtocolMismatchError
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.program import DriverState, Program
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import WorkerPulse, WorkerState


def test_a_head_of_another_protocol_is_refused(monkeypatch):
    async def ask(*_):
        return Status("e", "9.9", 1.0, [], [], [], protocol=PROTOCOL + 1)

    monkeypatch.setattr(queries, "_ask", ask)
    said = rf"{ENDPOINT} is rlinf-actors 9.9 .protocol {PROTOCOL + 1}., .*: upgrade this environment"
    with pytest.raises(ProtocolMismatchError, match=said):
        queries.fetch_status(ENDPOINT, Settings())


def test_nodes_of_one_host_name_have_their_ranks_or_ids_in_lists(shown):
    found = example_status()
    nodes = [replace(one, report=replace(one.report, hostname="lab")) for one in found.nodes]
    found = replace(found, nodes=[nodes[0], nodes[1], replace(nodes[2], rank=-1)])
    rows = [line.split("  ") for line in shown("nodes", status=found)[1].splitlines()[1:]]
    assert {row[0]: next(filter(None, row[1:])).strip() for row in rows} == {
        "0": "lab (rank 0) (head)", "1": "lab (rank 1)", "-": "lab (id-n2)",
    }  # fmt: skip
    assert "lab (rank 0) (10.0.0.1), process 11" in shown("worker", "show", "greeters:0", status=found)[1]


def test_nodes_json_has_stable_keys(shown):
    code, out, err = shown("nodes", "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert list(rows[0]) == [
        "rank", "id", "hostname", "ip", "state", "last_seen_s", "is_head", "num_cpus", "memory_bytes",
        "hardware", "models", "python", "interpreter", "interface", "interfaces", "faults", "incarnation",
        "draining", "admit", "closed",
    ]  # fmt: skip
    assert rows[0]["hardware"] == {"NV_GPU": 4}
    assert rows[0]["models"] == {"NV_GPU": ["A800"]}
    assert rows[2]["state"] == "lost"


def test_nodes_table_without_a_terminal_is_plain_and_aligned(shown):
    code, out, _ = shown("nodes")
    lines = out.splitlines()
    assert code == 0
    assert "\x1b" not in out
    assert lines[0].split() == ["RANK", "HOST", "ADDRESS", "STATE", "SEEN", "CPUS", "MEMORY", "HARDWARE", "PYTHON"]
    assert lines[1].startswith("0     n0 (head)  10.0.0.1  ready")
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_in_names_are_escaped(terminal, monkeypatch, capsys):
    """The driver chooses the name of a namespace, and the administrator's terminal shows it."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output.show_table(("GROUP",), [("a\x1b]0;me\x07\x9b2J\u202e\nb\r",)], "")
    output.show_fields({"client": "x\x1b[31m"})
    output.note("y\x1b[31m\nz")
    out, err = capsys.readouterr()
    assert r"a\x1b]0;me\x07\x9b2J\u202e\nb\r" in out
    assert r"client  x\x1b[31m" in out
    assert err == "y\\x1b[31m\nz\n"


def test_groups_are_listed(shown):
    _, out, _ = shown("groups", "--json")
    assert json.loads(out) == [
        {
            "namespace": "job-1",
            "name": "greeters",
            "class": "hello:Greeter",
            "state": "running",
            "world_size": 2,
            "workers": {"gone": 1, "running": 1},
            "unresponsive": 0,
            "in_breakpoints": 0,
            "node_ranks": [0, 1],
            "owner": "driver-1",
            "detached": False,
        }
    ]
    _, out, _ = shown("groups")
    assert "greeters" in out


def test_workers_that_do_not_answer_or_wait_in_a_breakpoint_are_counted(shown):
    status = example_status()
    pulses = [WorkerPulse("no answer"), None, *[WorkerPulse(breakpoint="a.py:1 in f")] * 2]
    workers = [WorkerState(f"w{n}", n, 0, "10.0.0.1", "running", pulse=pulse) for n, pulse in enumerate(pulses)]
    status = replace(status, groups=[replace(status.groups[0], workers=[status.groups[0].workers[0], *workers])])
    said = "1 gone, 4 running (1 unresponsive, 2 in breakpoints)"
    assert f"workers   {said}\n" in shown("status", status=status)[1]
    assert said in shown("groups", status=status)[1]
    assert f"greeters: hello:Greeter, running, {said}\n" in shown("job", "show", "job-1", status=status)[1]
    assert said in shown("job", "list", status=status)[1]


def test_workers_are_listed_by_rank_with_their_ends(shown):
    _, out, _ = shown("workers", "--json")
    first, second = json.loads(out)
    assert (first["name"], first["state"], first["exit"]) == ("greeters:0", "running", None)
    assert second["exit"] == {
        "kind": "signalled", "exit_code": None, "signal": 9, "oom": "suspected", "reason": "", "stderr_tail": [],
    }  # fmt: skip
    _, out, _ = shown("workers", "greeters")
    assert "signalled, signal 9, out of memory suspected" in out
    assert len(out.splitlines()) == 3


def test_only_workers_on_this_machine_have_figures(monkeypatch):
    status = example_status()
    (group,) = status.groups
    gone, running = group.workers
    mine = replace(running, pid=os.getpid())
    assert worker_dict(group, mine, 0.0)["process"] is None, "the pid on another machine is another process"
    assert worker_dict(group, replace(gone, pid=os.getpid()), 0.0, near=True)["process"] is None
    found = worker_dict(group, mine, 0.0, near=True)["process"]
    assert list(found) == ["cpu_s", "rss_bytes", "threads", "descriptors"]
    assert found["cpu_s"] > 0
    assert found["rss_bytes"] > 1 << 20
    assert found["threads"] >= threading.active_count()
    assert abs(found["descriptors"] - len(os.listdir("/proc/self/fd"))) < 5
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert worker_dict(group, replace(running, pid=ended.pid), 0.0, near=True)["process"] is None


def test_table_shows_figures_of_local_workers(shown, monkeypatch):
    monkeypatch.setattr("rlinf_actors.cli.views.host_key", lambda: "h")
    monkeypatch.setattr("rlinf_actors.cli.views.figures_of", lambda pid: Figures(7.5, 300 << 20, 12, None))
    _, out, _ = shown("workers", "--json")
    assert json.loads(out)[0]["process"] == {"cpu_s": 7.5, "rss_bytes": 300 << 20, "threads": 12, "descriptors": None}
    _, out, _ = shown("workers")
    assert out.splitlines()[0].split()[6:8] == ["CPU", "MEMORY"]
    assert "8 s  300 MiB" in out


@pytest.mark.parametrize(
    ("waiter", "name"),
    [
        ("w0", "greeters:0"),
        ("w0_1", "a child of greeters:0"),
        ("d1", "ann's train.py (pid 7 on gpu-1)"),
        ("d2", "a driver (pid 8)"),
        ("0123456789abcdef", "a process that has left the cluster (01234567)"),
    ],
)
def test_what_waits_for_a_channel_is_named(waiter, name):
    drivers = [
        DriverState("d1", "job-1", 7, 0, Program("ann", "gpu-1", "/home/ann/train.py")),
        DriverState("d2", "job-1", 8, 0, Program()),
    ]
    assert waiter_name(replace(example_status(), drivers=drivers), waiter) == name


NARROW = """
from rlinf_actors.cli.output import show_fields, show_table
show_fields({"groups": ["channel@gold: rlinf_actors.worker.channelhost:ChannelHost, running, 1 degraded"]})
heads = ["KEY", "HOST", "ITEMS", "BYTES", "OUT", "PUTS WAIT", "GETS WAIT", "UNDELIVERABLE", "WHO WAITS"]
show_table(heads, [["'empty'", "node0", 0, "0 B", 0, 0, 1, 0, "miners:0, ann's train.py (pid 17890 on vm)"]], "")
"""


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_shows_whole_words(columns):
    with narrow_terminal(f"COLUMNS={columns}", "NO_COLOR=1", sys.executable, "-c", NARROW, command=["env"]) as shown:
        assert shown.end() == 0, shown.shown
    lines = shown.shown.split("\n")
    assert {line for line in lines if len(line) > columns} <= {"        rlinf_actors.worker.channelhost:ChannelHost,"}
    assert {"degraded", "UNDELIVERABLE", "train.py"} <= set(shown.shown.split())
    assert any(line.startswith("        ") and "degraded" in line for line in lines), "what follows is indented"
    assert ("KEY            'empty'" in lines) == (columns == 40), "a line for each cell"


def test_workers_of_an_unknown_group_are_refused_with_the_groups_that_there_are(shown):
    code, out, err = shown("workers", "nobody")
    assert (code, out) == (64, "")
    assert "there is no group 'nobody'; there are: " in err


def test_status_shows_the_cluster(shown):
    _, out, _ = shown("status", "--json")
    data = json.loads(out)
    assert data["head"] == ENDPOINT
    assert data["nodes"] == {"ready": 2, "lost": 1}
    assert data["hardware"] == {"NV_GPU": 8}
    assert data["workers"] == {"gone": 1, "running": 1}
    assert data["faults"] == [{"node": "n2", "text": "NVML: driver mismatch"}]
    assert data["leases"][0] == {
        "key": "Arm:1",
        "title": "Arm 1",
        "namespace": "job-1",
        "group": "arms",
        "owner": "owned by driver, process 7",
        "workers": ["arms:0"],
        "nodes": ["n0 (10.0.0.1)"],
        "state": "held",
        "held_s": 312.25,
        "free_in_s": None,
    }
    assert (data["leases"][1]["state"], data["leases"][1]["free_in_s"]) == ("lost", 100.0)
    _, out, _ = shown("status")
    assert "up 75 s" in out
    assert "hardware  8 NV_GPU, 2 Arm (leased)\n" in out
    assert shown("nodes")[1].splitlines()[1].split("GiB  ")[1].startswith("4 NV_GPU, 1 Arm (leased)  3.")
    assert "Arm 1: group arms of job job-1, 5 min, owned by driver, process 7\n" in out
    assert "Arm 2: group far of job job-2, 20 s, whose owner has ended; its node is lost, free in 100 s\n" in out
    assert "fault     n2: NVML: driver mismatch" in out


def test_an_empty_cluster_says_so(shown):
    empty = Status("e", "0.1.0", 1.0, [], [], [])
    for command, said in (("nodes", "no node has registered\n"), ("groups", "no group is running\n")):
        assert shown(command, status=empty) == (0, "", said)
        assert json.loads(shown(command, "--json", status=empty)[1]) == []
    assert "none" in shown("status", status=empty)[1]


@pytest.mark.parametrize("command", ["status", "nodes", "groups", "workers"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_tokens_are_never_shown(shown, command, form):
    assert example_status().groups[0].token == "SECRET"
    assert "SECRET" not in "".join(map(str, shown(command, *form)))
