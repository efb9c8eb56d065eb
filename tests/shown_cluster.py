"""The cluster that the pictures of the documentation show: three machines with a robot, two jobs, and one lost node.

Nothing is written down twice. Each number is a function of time: what a node uses is the sum of what its workers use,
the depth of the channel is what has entered less what was taken, and an event is written by the head's own code.
"""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import msgspec

from rlinf_actors.counters import BOUNDS_S
from rlinf_actors.head import event_log
from rlinf_actors.head.commands import LogEvent
from rlinf_actors.head.records import Client, Group, Node, NodeLife, WorkerLife, WorkerRecord
from rlinf_actors.model.readable import duration
from rlinf_actors.sampling.sample import Board, Sample
from rlinf_actors.version import VERSION
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
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import (
    CHANNEL_GROUPS,
    ExitReport,
    GroupState,
    HardwareReport,
    LeaseState,
    NodeReport,
    ResourceReport,
    WorkerSpec,
)

GIB = 1 << 30
ROUND_S, ROUNDS = 5.0, 120
UPTIME_S, JOB_S, EVAL_S = 9672.0, 2820.0, 1510.0
"""Seconds since the head, the job pick-place and the job eval started."""
DIED_S, BACK_S, LOST_S = 842.0, 836.0, 362.0
"""Seconds since rollout:2 died, since it was up again, and since gpu-2 was declared lost."""
SILENT_S = 10.0
ITEM_BYTES, ITEMS, TRAINED, CYCLE_S, LEFT = 3_251_200, 8, 120, 75.0, 16
"""The channel: bytes of an item; items that enter in a round; items that actor takes in each cycle, and leaves."""
PHASE_S = 55.0
"""Seconds since actor has taken items."""


class Method(msgspec.Struct, frozen=True):
    """A method that is called `rate` times a second and runs for `seconds`. The running call began `now_s` ago."""

    name: str
    rate: float
    seconds: float
    now_s: float


class Part(msgspec.Struct, frozen=True):
    """What each rank of a group is and uses: processors, bytes, and bytes of its accelerator, whose share is busy."""

    cls: str
    job: str
    places: tuple[int, ...]
    pid: int
    cpu: float
    memory: int
    method: Method | None = None
    accelerator: int = 0
    busy: tuple[int, ...] = ()
    files: int = 96
    sent: Mapping[str, tuple[float, int]] = {}  # messages a second and bytes of each, by path


class Machine(msgspec.Struct, frozen=True):
    """A machine: what it has, and what is in use besides the workers."""

    cpus: int
    memory: int
    gpus: int
    cpu: float
    used: int
    disk: tuple[int, int]  # for logs: bytes in all, and free ones


MACHINES = (
    Machine(64, 512 * GIB, 4, 1.1, 18 * GIB, (880 * GIB, 331 * GIB)),
    Machine(64, 512 * GIB, 4, 0.4, 9 * GIB, (880 * GIB, 412 * GIB)),
    Machine(16, 64 * GIB, 0, 0.3, 4 * GIB, (220 * GIB, 26 * GIB)),
    Machine(64, 512 * GIB, 4, 0.4, 9 * GIB, (880 * GIB, 640 * GIB)),
)
HOSTS = (("gpu-0", "10.0.0.10"), ("gpu-1", "10.0.0.11"), ("arm-0", "10.0.0.20"), ("gpu-2", "10.0.0.12"))
ENDPOINT = f"tcp://{HOSTS[0][1]}:6380"
NODE_IDS = tuple(hashlib.sha256(name.encode()).hexdigest()[:12] for name, _ in HOSTS)
LOST = 3
PARTS: Mapping[str, Part] = {
    "actor": Part(
        "pick.workers:Actor", "pick-place", (0, 0, 0, 0), 41902, 4.6, 23 * GIB,
        Method("train", 1 / CYCLE_S, 70.4, PHASE_S - 1), 62 * GIB, (97, 96, 97, 94), 118, {"lane": (14.0, 1 << 27)},
    ),
    "rollout": Part(
        "pick.workers:Rollout", "pick-place", (1, 1, 1, 1), 18230, 6.8, 14 * GIB,
        Method("generate", 1 / ROUND_S, 4.62, 3.1), 37 * GIB, (71, 64, 68, 73), 104,
        {"bulk": (ITEMS / 4 / ROUND_S, ITEM_BYTES), "inline": (2.4, 3_410)},
    ),
    "env": Part(
        "pick.workers:Env", "pick-place", (2,), 2211, 1.7, 3 * GIB, Method("step", 9.6, 0.0924, 0.05), files=71,
        sent={"bulk": (9.6, 460_800)},
    ),
    "judge": Part("evaluate:Judge", "eval", (1, 1), 20551, 0.8, 2 * GIB, Method("score", 3.1, 0.236, 0.12), files=58),
    f"{CHANNEL_GROUPS}episodes": Part(
        "rlinf_actors.worker.channelhost:ChannelHost", "pick-place", (0,), 41951, 0.2, 640 << 20, files=49
    ),
}  # fmt: skip
DRIVERS = {"pick-place": ("kim", "/home/kim/pick/train.py", 41877), "eval": ("ann", "/home/ann/evaluate.py", 42630)}
SHOWN_WORKER = "rollout:2"
LAST_WORDS = ["episode 3388: 403 steps, success", "frame cache: 59.2 GiB of at most 60 GiB"]


def cluster(now: float) -> Board:
    """Return the cluster at *now*, in seconds since the epoch, after ROUNDS rounds."""
    found = Board()
    for number in range(ROUNDS):
        ago = ROUND_S * (ROUNDS - 1 - number)
        figures = {NODE_IDS[rank]: _figures(rank, ago) for rank in range(len(MACHINES)) if not _lost(rank, ago)}
        found.take(Sample(now - ago, 1e5 - ago, _status(now, ago), figures, {}, "", 0.0021, 0.018))
    found.take_events(_events(now))
    return found


def output(now: float) -> dict[str, list[str]]:
    """Return the lines of SHOWN_WORKER on stderr ("err") and stdout ("out"), with times up to *now*."""

    up, lines, minute_s = _uptime(SHOWN_WORKER.partition(":")[0], 2, 0.0), [], 60.0
    for number in range(int(up / minute_s), 0, -1):
        at = now - up % minute_s - minute_s * (number - 1)
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        made, won = round(minute_s / ROUND_S * ITEMS / 4), 13 + number * 5 % 7
        text = f"generated {made} episodes in the last minute, {won} succeeded"
        lines.append(f"[INFO {clock},{int(at % 1 * 1000):03} workers.py:88] {text}")
    steps = range(int((JOB_S - up) / CYCLE_S) + 1, int(JOB_S / CYCLE_S) + 1)
    return {"err": lines, "out": [f"loaded the weights of step {step} in 1.{3 + step % 2} s" for step in steps]}


# --- of the head ---


def _lost(rank: int, ago: float) -> bool:
    return rank == LOST and ago <= LOST_S


def _report(rank: int) -> NodeReport:
    machine, (name, ip) = MACHINES[rank], HOSTS[rank]
    gpus = [ResourceReport("NV_GPU", [HardwareReport("NV_GPU", "H100")] * machine.gpus)] if machine.gpus else []
    return NodeReport(
        NODE_IDS[rank], name, ip, f"host-{rank}", machine.cpus, machine.memory, "3.11.9", "/opt/venv/bin/python",
        resources=gpus, interface="eth0",
    )  # fmt: skip


def _node(rank: int, ago: float) -> Node:
    """Return a node as the head has it, whose clock shows 0 now."""
    silent = ago if not _lost(rank, ago) else LOST_S + SILENT_S
    node = Node(_report(rank), f"{rank}b7c41e9", b"", rank == 0, -silent if _lost(rank, ago) else -ago - 0.4, 0.0)
    node.life = NodeLife.LOST if _lost(rank, ago) else NodeLife.READY
    return node


def _program(job: str, now: float) -> Program:
    user, script, _ = DRIVERS[job]
    return Program(user, "gpu-0", script, now - _age(job) - 4.0)


def _age(job: str) -> float:
    return JOB_S if job == "pick-place" else EVAL_S


def _worker(name: str, rank: int, restarts: int = 0) -> WorkerRecord:
    part = PARTS[name]
    place = part.places[rank]
    spec = WorkerSpec(f"{name}-{rank}", name, part.job, rank, len(part.places), place, {}, incarnation=restarts)
    pid = part.pid + 7 * rank + 1903 * restarts
    worker = WorkerRecord(spec, NODE_IDS[place], HOSTS[place][1], WorkerLife.RUNNING, pid)
    if restarts:
        worker.exit = ExitReport("signalled", signal=9, oom="yes", stderr_tail=LAST_WORDS)
    return worker


def _restarts(name: str, rank: int) -> int:
    return int(f"{name}:{rank}" == SHOWN_WORKER)


def _status(now: float, ago: float) -> Status:
    groups = []
    for name, part in PARTS.items():
        workers = [_worker(name, rank, _restarts(name, rank)).state() for rank in range(len(part.places))]
        groups.append(GroupState(part.job, name, part.cls, f"of-{part.job}", "running", workers))
    programs = {job: _program(job, now) for job in DRIVERS}
    pid = DRIVERS["pick-place"][2]
    owner = f"owned by {programs['pick-place']} (pid {pid} on gpu-0, started {duration(JOB_S + 4)} ago)"
    lease = LeaseState(
        "Franka:10.0.0.31",
        "Franka 10.0.0.31",
        "pick-place",
        "env",
        owner,
        ["env:0"],
        ["arm-0 (10.0.0.20)"],
        "held",
        JOB_S - ago,
    )
    drivers = [DriverState(f"of-{job}", job, DRIVERS[job][2], 0, program) for job, program in programs.items()]
    nodes = [_node(rank, ago).state(rank, -ago) for rank in range(len(MACHINES))]
    return Status(
        "epoch", VERSION, UPTIME_S - ago, nodes, groups, [], [lease], at=now - ago, protocol=PROTOCOL, drivers=drivers
    )


def _events(now: float) -> list[ClusterEvent]:
    """Return the events since the first job, the newest last."""
    found: list[tuple[float, LogEvent]] = []
    for job, (_, _, pid) in DRIVERS.items():
        age = _age(job)
        driver = Client(f"{pid:x}c0ffee", "driver", job, "host-0", pid, 1, "", b"", 0.0, program=_program(job, now))
        found.append((age, event_log.of_driver("driver_joined", driver, "is here")))
        for name, part in PARTS.items():
            if part.job == job and not name.startswith(CHANNEL_GROUPS):
                group = Group(job, name, part.cls, driver.incarnation)
                found.append((age - 6, event_log.of_launch(group, len(part.places))))
    name, _, rank = SHOWN_WORKER.rpartition(":")
    before, after = _worker(name, int(rank)), _worker(name, int(rank), 1)
    before.life, before.exit = WorkerLife.GONE, after.exit
    host = HOSTS[PARTS[name].places[int(rank)]][0]
    for ago, worker, life in ((DIED_S, before, WorkerLife.RUNNING), (BACK_S, after, WorkerLife.STARTING)):
        event = event_log.of_life(worker, life, (host, -1))
        assert event is not None
        found.append((ago, event))
    why = f"is gone: its agentd was silent for {SILENT_S:.0f} s and is not connected"
    found.append((LOST_S, event_log.of_node("node_lost", _node(LOST, 0.0), why)))
    return [ClusterEvent(at, now - ago, event.kind, event.text) for at, (ago, event) in enumerate(found, 31)]


# --- of the nodes ---


def _wave(seconds: float, period_s: float, height: float) -> float:
    """Return a number that swings by *height*, so that its sum over time grows unevenly, as measured figures do."""
    return height * period_s / math.tau * math.sin(math.tau * seconds / period_s)


def _uptime(name: str, rank: int, ago: float) -> float:
    return (BACK_S if _restarts(name, rank) else _age(PARTS[name].job)) - ago


def _cpu_s(name: str, rank: int, ago: float) -> float:
    up, part = _uptime(name, rank, ago), PARTS[name]
    return part.cpu * (1 + 0.03 * rank) * up + _wave(up, 41.0 + 7 * rank, 0.12 * part.cpu)


def _done(method: Method, up: float, rank: int) -> int:
    return math.floor(method.rate * up + _wave(up, 97.0 + 11 * rank, 0.1 * method.rate))


def _calls(method: Method, up: float, rank: int) -> MethodFigures:
    buckets, done = [0] * (len(BOUNDS_S) + 1), _done(method, up, rank)
    buckets[bisect_left(BOUNDS_S, method.seconds)] = done
    return MethodFigures(method.name, done, 0, done * method.seconds, buckets)


def _channel(ago: float) -> ChannelFigures:
    rounds, cycle = (JOB_S - ago) / ROUND_S, CYCLE_S / ROUND_S
    since = (PHASE_S - ago) / ROUND_S  # rounds since actor has taken items for the last time before now
    entered = ITEMS * round(rounds)
    items = LEFT + ITEMS * round(since % cycle)
    return ChannelFigures(items, items * ITEM_BYTES, 1, entered=entered, max_items=256)


def _worker_figures(name: str, rank: int, ago: float) -> WorkerFigures:
    part, up = PARTS[name], _uptime(name, rank, ago)
    more: dict[str, Any] = {"accelerator_bytes": part.accelerator or -1}
    if name.startswith(CHANNEL_GROUPS):
        more["channel"] = _channel(ago)
    if part.method is not None:
        method = part.method
        more |= {"method": method.name, "call_s": method.now_s - 0.01 * rank, "calls": [_calls(method, up, rank)]}
    more["sent"] = [
        PathFigures(path, int(rate * up), int(rate * up) * size) for path, (rate, size) in part.sent.items()
    ]
    memory = round(part.memory * (1 + 0.013 * rank))
    used = ProcessFigures(_cpu_s(name, rank, ago), memory, 19 + 2 * rank, part.files + 3 * rank)
    return WorkerFigures(f"{name}-{rank}", used, delay_s=0.0004, **more)


def _figures(place: int, ago: float) -> NodeFigures:
    machine, devices = MACHINES[place], []
    here = [(name, rank) for name, part in PARTS.items() for rank, node in enumerate(part.places) if node == place]
    workers = [_worker_figures(name, rank, ago) for name, rank in here]
    used = machine.used + sum(one.process.rss_bytes for one in workers if one.process is not None)
    cpu_s = machine.cpu * (UPTIME_S - ago) + sum(_cpu_s(name, rank, ago) for name, rank in here)
    on_devices = [(part, rank) for part in PARTS.values() if part.accelerator for rank in range(len(part.places))]
    held = [(part.busy[rank], part.accelerator) for part, rank in on_devices if part.places[rank] == place]
    for busy, memory in held or [(0, 0)] * machine.gpus:
        devices.append(DeviceFigures("NV_GPU", busy, 34 + busy // 3, 80 * GIB, memory + (600 << 20)))
    size, free = machine.disk
    shared = sum(one.channel.size for one in workers if one.channel is not None) + (24 << 20)
    return NodeFigures(
        workers, ProcessFigures(0.004 * (UPTIME_S - ago), 41 << 20, 4, 58), cpu_s, machine.cpus, machine.cpu + 0.9 *
        sum(PARTS[name].cpu for name, _ in here), machine.memory, machine.memory - used, 0.0006, devices, 6.0,
        [
            DiskFigures("run", "/run/rlinf-agentd", machine.memory // 10, machine.memory // 10 - (3 << 20)),
            DiskFigures("logs", "/var/log/rlinf-actors", size, free),
            DiskFigures("memory", "/dev/shm", machine.memory // 2, machine.memory // 2 - shared),
        ],
        machine=f"boot-{place}",
    )  # fmt: skip
