"""A Board of a cluster as the head and its nodes describe it, with hostile names."""

from __future__ import annotations

from msgspec.structs import replace

from rlinf_actors.sampling.sample import Board, Sample
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.figure_values import (
    ChannelFigures,
    DeviceFigures,
    DiskFigures,
    MethodFigures,
    NodeFigures,
    PathFigures,
    ProcessFigures,
    WorkerFigures,
)
from rlinf_actors.wire.program import DriverState, Program
from rlinf_actors.wire.values import (
    ExitReport,
    GroupState,
    HardwareReport,
    LeaseState,
    NodeReport,
    NodeState,
    ResourceReport,
    WorkerPulse,
    WorkerState,
)

HOSTILE = "<script>alert(1)</script>\x1b[2J"
"""A text that a member chooses, where it is free to."""


def node(number: int, state: str = "ready", gpus: int = 2) -> NodeState:
    gpu = ResourceReport("NV_GPU", [HardwareReport("NV_GPU", "H100")] * gpus)
    report = NodeReport(
        f"id-{number}", f"gpu-{number}", f"10.0.0.{number}", "", 64, 1 << 38, "3.11.7", "/usr/bin/python3",
        resources=[gpu] if gpus else [], interface="eth0",
    )  # fmt: skip
    return NodeState(report, f"inc-{number}", number, state, 0.5, number == 0)


def status(workers: int = 2, hostile: str = HOSTILE, place: str = "") -> Status:
    """Return the state of a cluster. *place* is where rollout:1 waits in a breakpoint."""
    nodes = [node(0), node(1, "suspect"), node(2, "lost", gpus=0)]
    states = [WorkerState(f"w-{rank}", rank, rank % 2, "10.0.0.1", "running", 100 + rank) for rank in range(workers)]
    states[0] = WorkerState(
        "w-0", 0, 0, "10.0.0.0", "running", 100, restarts=1, pulse=WorkerPulse("it is silent", since=1.0),
        exit=ExitReport("signalled", signal=9, stderr_tail=[hostile]),
    )  # fmt: skip
    if place:
        states[1] = replace(states[1], pulse=WorkerPulse(breakpoint=place, breakpoint_since=40.0))
    host = WorkerState("c-0", 0, 0, "10.0.0.0", "running", 300)
    groups = [
        GroupState("job-a", "rollout", f"m:{hostile}", "d", "running", states),
        GroupState("job-a", "channel@samples", "m:ChannelHost", "d", "running", [host]),
    ]
    lease = LeaseState("arm", "Franka 10.0.0.9", "job-a", "rollout", hostile, ["rollout:0"], ["gpu-0"], "held", 90.0)
    driver = DriverState("d", "job-a", 7, 0, Program("kim", "gpu-0", f"/home/kim/{hostile}.py", 1.0))
    return Status(
        "epoch", "0.1.0", 60.0, nodes, groups, [], [lease], [f"all robots: {hostile}"], [hostile], 100.0, 7, 6,
        drivers=[driver],
    )  # fmt: skip


def figures(at: float, done: int, hostile: str = HOSTILE) -> dict[str, NodeFigures]:
    buckets = [0, 0, 0, done, *[0] * 11]

    def worker(id: str, **more: object) -> WorkerFigures:
        calls = [MethodFigures("step", done, 1, done * 0.002, buckets), MethodFigures(hostile, 0, 2)]
        used = ProcessFigures(at / 2, 1 << 30, 8, 60)
        return WorkerFigures(
            id, used, hostile, 3.0, 2, calls, [PathFigures("shared", done, done << 20)], 500, 1, **more
        )

    channel = ChannelFigures(done, done << 10, 1, 2, 3, 0, 1, done, 1000, 1 << 30)
    devices = [DeviceFigures("NV_GPU", 50, 60, 80 << 30, 20 << 30), DeviceFigures("NV_GPU")]
    disks = [DiskFigures("logs", "/var/log", 100 << 30, 2 << 30)]
    used = ProcessFigures(1.0, 50 << 20, 3, None)
    return {
        "id-0": NodeFigures(
            [worker("w-0"), WorkerFigures("c-0", used, channel=channel)],
            used, at * 32, 64, 20.0, 1 << 38, 1 << 37, 0.001, devices, 3.0, disks,
        ),
        "id-1": NodeFigures([worker("w-1")], used, at * 32, 64, 20.0, 1 << 38, 1 << 37, 0.001, [], 0.0, disks),
    }  # fmt: skip


def board(hostile: str = HOSTILE, place: str = "") -> Board:
    """A board after three rounds, one each 5 s, with 10 calls of each worker in each. *place* is as in `status`."""
    found = Board()
    for number in range(3):
        at = 100.0 + 5.0 * number
        sample = Sample(
            1e9 + at,
            at,
            status(hostile=hostile, place=place),
            figures(at, 10 * (number + 1), hostile),
            {},
            "",
            0.002,
            0.02,
        )
        found.take(sample)
    found.take_events([ClusterEvent(1, 1e9, "worker_died", f"worker rollout:0 died: {hostile}", "gpu-0")])
    return found
