"""The checks of `rlinf-actors doctor` on the facts of one machine: this one, or a node by its agentd. Pure."""

from __future__ import annotations

from rlinf_actors.cli.doctor.finding import FAIL, PASS, WARN, Check, Finding
from rlinf_actors.cli.output import mib
from rlinf_actors.model.readable import duration
from rlinf_actors.wire.check_values import NodeFacts

MIN_FILES, GOOD_FILES = 256, 4096
"""Required and recommended limit of open files: a driver needs about 40; agentd 30, and more for each worker."""
GOOD_SHM = 1 << 30
LOW_LOGS, NO_LOGS = 1 << 30, 100 << 20
"""Free bytes of the disk of logs below which the check warns, and fails."""
FULL_IN_S = 24 * 3600.0
"""The check warns if the disk of logs is full in less time, at the speed of the last hour."""


def open_files(facts: NodeFacts) -> list[Finding]:
    """Limit of open files: fails below 256, warns below 4096. agentd needs 30 and about 7 for each worker."""
    soft, hard = facts.open_files
    fix = "ulimit -Hn 65536 (LimitNOFILE= in a systemd unit, --ulimit nofile=65536 for docker)"
    if hard < MIN_FILES:
        return [Finding("open_files", FAIL, f"at most {hard} open files; {MIN_FILES} are the least", fix)]
    if hard < GOOD_FILES:
        return [Finding("open_files", WARN, f"at most {hard} open files: about {(hard - 60) // 7} workers", fix)]
    return [Finding("open_files", PASS, f"{soft} open files, up to {hard}")]


def locked_memory(facts: NodeFacts) -> list[Finding]:
    """Limit of locked memory: warns below 64 MiB on a machine with accelerators, where RDMA needs it."""
    if 0 <= facts.locked_memory < 64 << 20 and facts.accelerators:
        text = f"{mib(facts.locked_memory)} of locked memory: RDMA of NCCL may fail"
        return [Finding("locked_memory", WARN, text, "ulimit -l unlimited (LimitMEMLOCK=infinity)")]
    text = "unlimited" if facts.locked_memory < 0 else mib(facts.locked_memory)
    return [Finding("locked_memory", PASS, f"{text} of locked memory")]


def real_time(facts: NodeFacts) -> list[Finding]:
    """Real-time priority: warns if the machine has robots, and its workers may not get any. libfranka needs it."""
    if facts.real_time:
        return [Finding("real_time", PASS, f"real-time priority up to {facts.real_time}")]
    if facts.robots:
        text = "workers get no real-time priority, which SDKs of robots such as libfranka need"
        return [Finding("real_time", WARN, text, "LimitRTPRIO=99 in agentd's unit (rtprio in limits.conf for a shell)")]
    return [Finding("real_time", PASS, "no real-time priority; only robots need it")]


def dev_shm(facts: NodeFacts) -> list[Finding]:
    """Size of /dev/shm: warns below 1 GiB. torch's DataLoader and NCCL use it, this library does not."""
    if not facts.shared_memory:
        text = "there is no /dev/shm: torch's DataLoader and NCCL need it, this library does not"
        return [Finding("dev_shm", WARN, text, "mount -t tmpfs tmpfs /dev/shm")]
    size, free = facts.shared_memory
    if min(size, free) < GOOD_SHM:
        text = f"/dev/shm has {mib(free)} of {mib(size)} free: torch's DataLoader and NCCL may not fit"
        return [Finding("dev_shm", WARN, text, "mount -o remount,size=8G /dev/shm, or docker run --shm-size 8g")]
    return [Finding("dev_shm", PASS, f"/dev/shm has {mib(free)} free")]


def clock(facts: NodeFacts) -> list[Finding]:
    """Whether a program synchronizes the clock: warns if none does."""
    if facts.clock_synchronized is False:
        text = "the clock is not synchronized: the times in logs of several machines will not fit together"
        return [Finding("clock", WARN, text, "timedatectl set-ntp true (in a container: on its host)")]
    known = "the clock is synchronized" if facts.clock_synchronized else "the clock's state is not known"
    return [Finding("clock", PASS, known)]


def ptrace(facts: NodeFacts) -> list[Finding]:
    """Whether `stack --py-spy` works: Yama's ptrace_scope, and py-spy. Warns if the kernel forbids it."""
    if facts.ptrace_scope >= 3 or (facts.ptrace_scope == 2 and not facts.traces_all):
        text = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: `stack --py-spy` cannot read workers"
        until = "; it then boots again, since 3 stays until then" if facts.ptrace_scope >= 3 else ""
        return [Finding("ptrace", WARN, text, f"sysctl kernel.yama.ptrace_scope=1 (in /etc/sysctl.d){until}")]
    if not facts.py_spy:
        return [Finding("ptrace", PASS, "py-spy is not installed; only `stack --py-spy` needs it")]
    return [Finding("ptrace", PASS, f"`stack --py-spy` works (ptrace_scope {facts.ptrace_scope})")]


def logs(facts: NodeFacts) -> list[Finding]:
    """Disk of workers' logs: fails below 100 MiB, warns below 1 GiB, or if it is full in a day at the last hour's
    speed.
    """
    use = facts.logs
    if use is None or not use.disk.total_bytes:
        return []
    free, path = use.disk.free_bytes, use.disk.path
    text = f"{path} has {mib(free)} of {mib(use.disk.total_bytes)} free; {use.files} log files have {mib(use.size)}, "
    text += f"{mib(use.last_hour)} of them from the last hour"
    fix = f"du -ah {path} | sort -h | tail; remove logs of ended jobs, or lower log_total_max_gb or log_keep_days in "
    fix += "[workers] of agentd.toml, and reload agentd"
    if free < NO_LOGS:
        return [Finding("logs", FAIL, f"{text}: output of workers is lost soon", fix)]
    full_s = free / use.last_hour * 3600 if use.last_hour else FULL_IN_S
    if full_s < FULL_IN_S:
        return [Finding("logs", WARN, f"{text}: the disk is full in {duration(full_s)}", fix)]
    return [Finding("logs", WARN if free < LOW_LOGS else PASS, text, fix if free < LOW_LOGS else "")]


def holders(facts: NodeFacts) -> list[Finding]:
    """Processes that hold memory of NVIDIA's GPUs: warns of those that have ended, or whose worker has.

    From a container, whose processes are its own, an ended process cannot be told from another container's.
    """
    found = []
    for one in facts.holders:
        held = f"{mib(one.size)} of GPU {one.device}" if one.size else f"memory of GPU {one.device}"
        if one.state == "ended":
            fix = f"fuser -v /dev/nvidia{one.device} names who still has it open: end it; else nvidia-smi --gpu-reset"
            fix += f" -i {one.device} when nothing else runs there"
            found.append(Finding("gpu_holders", WARN, f"process {one.pid} has ended and still holds {held}", fix))
        elif one.state == "orphan":
            text = f"process {one.pid} ({one.command}) of a worker that is gone holds {held}"
            found.append(Finding("gpu_holders", WARN, text, f"kill -9 {one.pid}"))
    workers = sum(one.state == "worker" for one in facts.holders)
    others = sum(one.state in ("other", "hidden") for one in facts.holders)
    text = "no process holds memory of a GPU"
    if workers or others:
        text = f"memory of GPUs is held by processes of workers: {workers}, and others: {others}"
    return found or [Finding("gpu_holders", PASS, text)]


def faults(facts: NodeFacts) -> list[Finding]:
    """What the machine could not find out, such as a file system that does not answer: warns."""
    fix = "rlinf-actors hw scan on that machine shows more; look at its kernel log (dmesg)"
    return [Finding("unknown", WARN, text, fix) for text in facts.faults]


def worker_cgroups(facts: NodeFacts) -> list[Finding]:
    """Which cgroups and limits workers of a node get: warns, with what is missing."""
    found = []
    if not facts.cgroup:
        text = "workers get no cgroup (v2): processes that they leave are found only by an inherited mark"
        found.append(Finding("cgroup", WARN, text, facts.cgroup_why.get("cgroup", "see its log")))
    for name, option in (("memory", "memory_limit"), ("pids", "pids_limit")):
        if name in facts.cgroup_why:
            found.append(Finding(f"{name}_limit", WARN, f"{option} cannot hold", facts.cgroup_why[name]))
    return found or [Finding("cgroup", PASS, f"each worker gets a cgroup in {facts.cgroup}, and limits hold")]


NODE_CHECKS: tuple[Check[NodeFacts], ...] = (
    Check(("dev_shm",), dev_shm),
    Check(("open_files",), open_files),
    Check(("locked_memory",), locked_memory),
    Check(("real_time",), real_time),
    Check(("clock",), clock),
    Check(("ptrace",), ptrace),
    Check(("logs",), logs),
    Check(("gpu_holders",), holders),
    Check(("unknown",), faults),
)
"""The checks on the facts of one machine."""
OF_NODES: tuple[Check[NodeFacts], ...] = (
    *NODE_CHECKS,
    Check(("cgroup", "memory_limit", "pids_limit"), worker_cgroups),
)
"""The checks on the facts of a node. This machine's cgroups have a check of their own, which knows its agentd."""
