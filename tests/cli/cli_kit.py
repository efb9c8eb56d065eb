"""An example of a cluster's status, and what a shell completes."""

from __future__ import annotations

import shlex
import subprocess

from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.values import (
    ExitReport,
    GroupState,
    HardwareReport,
    LeaseState,
    NodeReport,
    NodeState,
    ResourceReport,
    WorkerState,
)

COMPLETE = """
eval "$(rlinf-actors completion bash)"
COMP_WORDS=({words}); COMP_CWORD={last}
$(complete -p rlinf-actors | sed -E "s/.* -F ([^ ]+) .*/\\1/") rlinf-actors
printf "%s\\n" "${{COMPREPLY[@]}}"
"""

ENDPOINT = "tcp://127.0.0.1:6380"


def node(rank: int, gpus: int = 0, state: str = "ready", faults: list[str] | None = None) -> NodeState:
    name = f"n{rank if rank >= 0 else 'x'}"
    resources = [ResourceReport("NV_GPU", [HardwareReport("NV_GPU", "A800", {"index": i}) for i in range(gpus)])]
    report = NodeReport(
        node_id=f"id-{name}",
        hostname=name,
        ip=f"10.0.0.{rank + 1}",
        host="h",
        num_cpus=8,
        memory_bytes=2**36,
        python="3.11.7",
        interpreter="/usr/bin/python3",
        resources=resources if gpus else [],
        faults=faults or [],
    )
    return NodeState(report, f"inc-{name}", rank, state, 0.25, is_head=rank == 0)


def example_status() -> Status:
    workers = [
        WorkerState("w1", 1, 1, "10.0.0.2", "gone", 12, exit=ExitReport("signalled", signal=9, oom="suspected")),
        WorkerState("w0", 0, 0, "10.0.0.1", "running", 11),
    ]
    group = GroupState("job-1", "greeters", "hello:Greeter", "driver-1", "running", workers, token="SECRET")
    nodes = [node(0, gpus=4), node(1, gpus=4), node(2, state="lost", faults=["NVML: driver mismatch"])]
    leases = [
        LeaseState(
            "Arm:1",
            "Arm 1",
            "job-1",
            "arms",
            "owned by driver, process 7",
            ["arms:0"],
            ["n0 (10.0.0.1)"],
            "held",
            312.25,
        ),
        LeaseState(
            "Arm:2", "Arm 2", "job-2", "far", "whose owner has ended", ["far:0"], ["n2 (10.0.0.3)"], "lost", 20.0, 100.0
        ),
    ]
    clients = ["driver 3f2a, process 7, job 'job-1'"]
    return Status("epoch-1", "0.1.0", 75.0, nodes, [group], clients, leases)


def tab(*words: str) -> list[str]:
    """Return what bash offers for the last of *words* in place of that word. bash makes a colon a word of its own."""
    script = COMPLETE.format(words=shlex.join(words), last=len(words) - 1)
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()
