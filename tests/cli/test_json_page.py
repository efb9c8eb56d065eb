"""docs/reference/json.md has the keys that commands print with --json, and no others."""

from __future__ import annotations

import io
import json
import pathlib
import re
from collections import deque
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import msgspec
import pytest
from cli_kit import node
from msgspec.structs import replace

from rlinf_actors.cli.channel_command import figures_dict
from rlinf_actors.cli.doctor.cluster import ClusterFacts, End, Path
from rlinf_actors.cli.doctor.command import report
from rlinf_actors.cli.doctor.finding import Finding
from rlinf_actors.cli.estop_targets import KnownHeads, Report, StopTarget
from rlinf_actors.cli.estop_targets import summary as stop_summary
from rlinf_actors.cli.hw_command import scan_dict
from rlinf_actors.cli.job_command import job_dict, stopped_dict
from rlinf_actors.cli.keys_command import key_dict
from rlinf_actors.cli.log_sources import Source
from rlinf_actors.cli.logs_command import line_dict
from rlinf_actors.cli.stack_report import ShownWorker, report_dict
from rlinf_actors.cli.top import view as top_view
from rlinf_actors.cli.trace_command import switch_dict, trace_dict
from rlinf_actors.cli.views import driver_dict, group_dict, node_dict, summary, worker_dict
from rlinf_actors.cli.worker_command import KILLED, _worker_of
from rlinf_actors.cluster.trace_files import Traced, TraceReport
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.messaging.routes import COLUMNS
from rlinf_actors.net.blocking_client import RemoteHead
from rlinf_actors.sampling.sample import Board, Channel, NodeView, WorkerView
from rlinf_actors.wire.check_values import NodeFacts, PathAnswer
from rlinf_actors.wire.client_messages import EStopped, Status
from rlinf_actors.wire.event_values import ClusterEvent, event_dict
from rlinf_actors.wire.figure_values import ChannelFigures, DeviceFigures, KeyFigures
from rlinf_actors.wire.hook_values import HookState
from rlinf_actors.wire.key_messages import KeyState
from rlinf_actors.wire.program import DriverState, Program
from rlinf_actors.wire.stack_values import Stack, StackFrame, Wait, WorkerStacks
from rlinf_actors.wire.trace_values import SwitchedWorkers
from rlinf_actors.wire.values import ExitReport, GroupState, LeaseState, NodeReport, NodeState, RobotStop, WorkerState
from rlinf_actors.worker.log_format import KEYS

PAGE_PATH = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "json.md"
PAGE = PAGE_PATH.read_text()
WORKER = WorkerState(id="g-0", rank=0, node_rank=0, node_ip="10.0.0.1", state="running")
GROUP = GroupState("ns", "g", "m:C", "d1", "running", [WORKER])
LEASE = LeaseState("k", "arm", "ns", "g", "owner", ["g:0"], ["n0"], "held", 1.0, None)
STACKS = WorkerStacks(
    "g-0", waits=[Wait("recv()", 1.0, ["g:1"], blocks=True)], stacks=[Stack("MainThread", [StackFrame("a.py", 1, "f")])]
)
TORCH = "/lib/torch/distributed/distributed_c10d.py"
REDUCES = replace(STACKS, stacks=[Stack("MainThread", [StackFrame(TORCH, 1, "all_reduce")])])
WAITER = replace(STACKS, id="g-1", waits=[Wait("recv()", 1.0, ["g:0"], blocks=True)])
REPORT = report_dict([ShownWorker("ns", "g", 0, "n0", STACKS), ShownWorker("ns", "g", 1, "n0", WAITER)])

SOURCE = Source(node(0), "ns", "g", "0", "out", {}, True)
STATUS = Status("e", "1", 1.0, [], [GROUP], [], [LEASE])

NODE = NodeState(NodeReport("n1", "n1", "10.0.0.1", "h", 1, 1, "3.11", "/p"), "i", 0, "ready", 0.0)
END = End("n1", "n1", "10.0.0.1")
CLUSTER = ClusterFacts([NODE], {"n1": NodeFacts("1")}, paths=[Path(END, END, PathAnswer())])
DIAGNOSIS = report([Finding("a", "pass", "")], NodeFacts("1"), CLUSTER)


def printed_stop() -> dict[str, Any]:
    """Return what `estop --json` prints of one head."""
    made, out = Report(True), io.StringIO()
    made.add(StopTarget("h:1", "head", None, RemoteHead([])), EStopped())
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        made.end(KnownHeads())
    said: dict[str, Any] = json.loads(out.getvalue())
    return said


STOP = printed_stop()
PRINTED = {
    "An event": event_dict(ClusterEvent(1, 1.0, "estop", "")),
    "An end": msgspec.structs.asdict(ExitReport("exited")),
    "The status": summary("head", STATUS),
    "A hook": msgspec.structs.asdict(HookState("command")),
    "A driver": driver_dict(DriverState("d1", "ns", 1, 0, Program())),
    "A lease": summary("head", STATUS)["leases"][0],
    "A node": node_dict(NODE),
    "A shown node": {**node_dict(NODE), "groups": []},
    "The hardware of a machine": scan_dict(ProbeReport("n", 1, 1, "3.11", "/p"), None),
    "A plan": dict.fromkeys(["num_nodes", "num_accelerators", "placement_mode", "nodes", "components"]),
    "A path": dict.fromkeys(["kind", *COLUMNS, "path", "meaning"]),
    "A group": group_dict(GROUP),
    "A worker": worker_dict(GROUP, WORKER, 1.0),
    "A job": job_dict("ns", STATUS),
    "A stopped job": stopped_dict({}, {}),
    "A shown worker": _worker_of(STATUS, GROUP, WORKER),
    "An emergency stop": STOP,
    "A stopped cluster": STOP["clusters"][0],
    "A stopped worker": msgspec.structs.asdict(RobotStop("w", "ns", [], "n0", True)),
    "A lifted stop": dict.fromkeys(["head", "lifted", *stop_summary(EStopped())]),
    "Made keys": dict.fromkeys(["dir", "head", "driver", "name"]),
    "An enrolled key": dict.fromkeys(["name", "role", "head", "file", "token", "expires_s", "command"]),
    "A joined key": dict.fromkeys(["name", "role", "file", "address"]),
    "The listed keys": dict.fromkeys(["head", "keys"]),
    "A listed key": key_dict(KeyState("k", "agent", "n0", 1.0, "kim")),
    "A rotated key": dict.fromkeys(["role", "name", "file", "public"]),
    "A trusted key": dict.fromkeys(["head", "files"]),
    "A killed worker": dict.fromkeys([*KILLED, "dead", "exit"]),
    "A channel": {
        **dict.fromkeys(["name", "job", "host", "worker", "fault"]),
        **figures_dict(ChannelFigures()),
    },
    "A diagnosis": DIAGNOSIS,
    "A finding": DIAGNOSIS["findings"][0],
    "Facts of a node": DIAGNOSIS["nodes"][0],
    "A tested path": DIAGNOSIS["paths"][0],
    "A line of output": line_dict(SOURCE, "", None),
    "A logged record": dict.fromkeys(KEYS),
    "A switched trace": switch_dict("ns", 1, [(Traced("n0", "node n0", "h"), SwitchedWorkers())]),
    "A fetched trace": trace_dict("ns", pathlib.Path("trace.json"), TraceReport()),
    "A report of stacks": REPORT,
    "An uneven collective": report_dict(
        [ShownWorker("ns", "g", 0, "n0", REDUCES), ShownWorker("ns", "g", 1, "n0", STACKS)]
    )["collectives"][0],
    "A cycle of waits": REPORT["cycles"][0],
    "A step of a cycle": REPORT["cycles"][0]["steps"][0],
    "The stacks of a worker": REPORT["workers"][0],
    "A wait": REPORT["workers"][0]["waits"][0],
    "A stack": REPORT["workers"][0]["stacks"][0],
    "A frame": REPORT["workers"][0]["stacks"][0]["frames"][0],
    "The figures": top_view.report(Board(), "head"),
    "Figures of a node": top_view.node_dict(NodeView(NODE, None, "", None, 0, "n")),
    "Figures of an accelerator": top_view.device_dict(DeviceFigures("NV_GPU")),
    "Figures of a worker": top_view.worker_dict(WorkerView(GROUP, WORKER, None, None)),
    "Figures of a channel": top_view.channel_dict(Channel("ns", "c", GROUP, ChannelFigures(), None, deque())),
    "A key of a channel": msgspec.structs.asdict(KeyFigures("k")),
}


def keys_of(title: str) -> list[str]:
    """Return the keys of the object that the section *title* of the page documents."""
    section = re.search(rf"^## {title}\n(.*?)(^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{PAGE_PATH} has no section {title!r}"
    rows = re.findall(r"^\| (`.*?) \|", section[1], re.MULTILINE)
    return [key for row in rows for key in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("title", PRINTED)
def test_page_has_the_keys_of_each_object(title):
    assert sorted(keys_of(title)) == sorted(PRINTED[title])


def test_every_section_is_checked():
    assert set(re.findall(r"^## (.*)", PAGE, re.MULTILINE)) == set(PRINTED)
