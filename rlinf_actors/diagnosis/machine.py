"""Collects facts about this machine: limits, interfaces, packages, who holds accelerators. Reads only; any thread.

agentd collects them of its node, and `rlinf-actors doctor` of its own machine. Packages are found by the names of their
records in the import path: nothing of a user is opened or run, since a FIFO there would stop the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import re
import resource
import socket
import struct
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.diagnosis.ptrace import find_py_spy, yama
from rlinf_actors.hardware.child_process import fault_of, run_child
from rlinf_actors.hardware.interfaces import ipv4_interfaces
from rlinf_actors.version import VERSION
from rlinf_actors.wire.check_values import PACKAGES, Holder, Interface, Interpreter, NodeFacts
from rlinf_actors.wire.figure_values import DiskFigures

HOLDERS_S = 8.0
"""Seconds that a vendor's library has to name the processes on its accelerators."""
NAMES_HOLDERS = frozenset({"NV_GPU"})
"""Types of accelerators whose library names the processes that hold memory."""
MOST_INTERFACES = 64
"""Most interfaces of a machine that are described (wire.bounds.Few)."""
SHARED_MEMORY = "/dev/shm"
SYS_PTRACE = {"CAP_SYS_PTRACE": 19}
_SIOCGIFNETMASK = 0x891B
"""linux/sockios.h: the netmask of an interface."""
_RECORD = re.compile(r"([A-Za-z0-9._]+)-([^-]+)\.(?:dist-info|egg-info)", re.ASCII)
"""The directory that an installer makes for a package: name and version."""
_PYTHON = re.compile(r"/python(3\.[0-9]+)(?:/|$)")
_MOST_ENTRIES = 20_000
"""Most entries of a directory that are looked at: a user may put any number there."""
_HOST_PID_NAMESPACE = 0xEFFFFFFC
"""linux/proc_ns.h: the inode of the machine's own pid namespace."""
_TIME_ERROR = 5
"""Value that adjtimex(2) returns while no program synchronizes the clock."""
_MODULES = {"zmq": "pyzmq", "rlinf_actors": "rlinf-actors"}
"""The packages whose modules have other names."""


class Imports(msgspec.Struct, frozen=True):
    """An interpreter, its import path, and the modules that its workers preload."""

    interpreter: str
    paths: tuple[str, ...]
    modules: tuple[str, ...] = ()


def collect(cgroups: Roots, workers: int = 0) -> NodeFacts:
    """Return the facts that need no waiting. *cgroups* are the directories in which workers' cgroups are made."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        version=VERSION,
        interpreters=[own_interpreter()],
        interfaces=interfaces(),
        open_files=(soft, hard),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        real_time=resource.getrlimit(resource.RLIMIT_RTPRIO)[1],
        shared_memory=_shared_memory(),
        ptrace_scope=yama(),
        py_spy=find_py_spy(),
        traces_all=not procfs.missing_capabilities(SYS_PTRACE),
        cgroup=cgroups.unified,
        cgroup_why=cgroups.why,
        clock_synchronized=is_clock_synchronized(),
        workers=workers,
    )


def own_interpreter() -> Interpreter:
    """Return the interpreter of this process."""
    return Interpreter(sys.executable, platform.python_version(), versions(sys.path), own=True)


def interpreter_of(imports: Imports) -> Interpreter:
    """Return an interpreter of workers. Its version is that of its import path: 3.11, without the last number."""
    found = next((match[1] for path in imports.paths if (match := _PYTHON.search(path))), "")
    tops = [name.partition(".")[0] for name in imports.modules]
    return Interpreter(imports.interpreter, found, versions(imports.paths, [_MODULES.get(top, top) for top in tops]))


def versions(paths: Iterable[str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the installed versions of PACKAGES, "" for those that are not installed, and of *more* that are."""
    found: dict[str, str] = {}
    for path in paths:
        if os.path.basename(path) not in ("site-packages", "dist-packages"):
            continue
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
                if match := _RECORD.fullmatch(entry.name):
                    found.setdefault(match[1].lower().replace("_", "-"), match[2])
    names = [name.lower().replace("_", "-") for name in more]
    return {
        **{name: found.get(name, "") for name in PACKAGES},
        **{name: found[name] for name in names if name in found},
    }


def interfaces() -> list[Interface]:
    """Return the interfaces with an IPv4 address, except the loopback; the first MOST_INTERFACES."""
    found = [(name, ip) for name, ip in ipv4_interfaces().items() if not ip.startswith("127.")]
    return [_interface(name, ip) for name, ip in found[:MOST_INTERFACES]]


def _interface(name: str, ip: str) -> Interface:
    def number(file: str) -> int:
        try:  # the kernel refuses the speed of a link that is down
            return max(0, int(Path(f"/sys/class/net/{name}/{file}").read_text()))
        except (OSError, ValueError):
            return 0

    return Interface(
        name,
        ip,
        _prefix(name),
        procfs.text_of(f"/sys/class/net/{name}/operstate").strip() != "down",
        number("mtu"),
        number("speed"),
        number("statistics/rx_errors"),
        number("statistics/tx_errors"),
    )


def _prefix(name: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker, _SIOCGIFNETMASK, name.encode()[:15].ljust(40, b"\0"))
        except OSError:
            return 0
    return int(struct.unpack("!I", answer[20:24])[0]).bit_count()


def disk_figures(purpose: str, path: str) -> DiskFigures | None:
    """Return the size and free bytes of the disk of *path*, None if *path* does not exist, such as before the first
    worker.
    """
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    return DiskFigures(purpose, path, disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)


def _shared_memory() -> list[int]:
    disk = disk_figures("memory", SHARED_MEMORY)
    return [] if disk is None else [disk.total_bytes, disk.free_bytes]


def is_clock_synchronized() -> bool | None:
    """Return whether a program synchronizes this machine's clock, None if the kernel does not say it."""
    state = int(
        ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    )  # without a mode it only reads
    return None if state < 0 else state != _TIME_ERROR


# --- who holds accelerators ---


async def holders(
    kinds: Iterable[str], env: Mapping[str, str], workers: Container[str] | None = None
) -> tuple[list[Holder], list[str]]:
    """Return the processes that hold memory of accelerators of *kinds*, and faults of vendors' libraries for people.

    Call this in an event loop of the main thread: the libraries run in child processes with the environment *env*.

    Args:
        workers: ids of the running workers of this agentd; None if a worker is known by its template only.
    """
    found: list[Holder] = []
    faults = []
    for kind in NAMES_HOLDERS.intersection(kinds):
        module = "rlinf_actors.hardware.probe_child:holders_main"
        end = await run_child(module, [kind], env=env, timeout_s=HOLDERS_S)
        fault = fault_of(end, f"the library of {kind}", HOLDERS_S)
        answer = {} if fault else json.loads(end.output)
        faults += [fault] * bool(fault) + [str(one) for one in answer.get("faults", [])]
        held = [(int(device), int(pid), int(size)) for device, pid, size in answer.get("held", [])]
        found += [_holder(*one, workers) for one in held]
    return found, faults


def _holder(device: int, pid: int, size: int, workers: Container[str] | None) -> Holder:
    found = procfs.stat(pid)
    if found is None or found.ended:
        ours = os.stat("/proc/self/ns/pid").st_ino == _HOST_PID_NAMESPACE
        return Holder(device, pid, size, "ended" if ours else "hidden")
    command = procfs.text_of(f"/proc/{pid}/comm").strip()[:64]
    mark = procfs.mark_of(pid)
    if mark is None:
        return Holder(device, pid, size, "other", command)
    if not mark.strip("-") or (workers is not None and mark in workers) or has_template(pid):
        return Holder(device, pid, size, "worker", command)
    return Holder(device, pid, size, "orphan", command)


def has_template(pid: int) -> bool:
    """Return True if the process *pid* descends from a running template."""
    while pid > 1 and (found := procfs.stat(pid)) is not None:
        pid = found.parent
        mark = procfs.mark_of(pid)
        if mark is not None and not mark.strip("-"):
            return True
    return False
