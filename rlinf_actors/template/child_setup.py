"""The set-up of a worker process, between its start and the first code of the user. Includes NUMA binding.

`run` turns a forked process, or a new interpreter, into the worker: signals, session, cgroup, environment, limits,
directory, import path, streams, random seeds, CPUs. The process has only one thread while `run` does this, so all
threads that it starts later inherit the NUMA binding.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import platform
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rlinf_actors import environ_block, forks, procfs
from rlinf_actors.cgroups.worker_cgroup import Cgroup
from rlinf_actors.dropin import install_if_asked
from rlinf_actors.settings import CATCH_FAILURE, CHILDREN, PROBE_ROOT
from rlinf_actors.template import watchdog
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.child_protocol import socket_path
from rlinf_actors.worker.lease_guard import Guarded

SYSFS = "/sys/devices/system/node"

_MPOL_PREFERRED = 1
_MPOL_PREFERRED_MANY = 5
"""From linux/mempolicy.h: prefer memory of one NUMA node, or of several NUMA nodes (since Linux 5.15)."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "loongarch64": 237}
"""System call number of set_mempolicy(2) by machine type. The C library has no function for this system call."""
_LONG_BITS = ctypes.sizeof(ctypes.c_ulong) * 8


class NumaBinding(msgspec.Struct, frozen=True):
    """The CPUs and NUMA nodes to which a worker is bound, and the reason if it is not bound to all
    that it should be.
    """

    cpus: frozenset[int] = frozenset()  # empty for no change
    memory: tuple[int, ...] = ()  # NUMA nodes whose memory is preferred; empty for no change
    note: str = ""  # why the worker is not bound, or only in part


def decide(wanted: Sequence[int], tree: str, allowed: Collection[int]) -> NumaBinding:
    """Return to which CPUs and NUMA nodes a worker is to be bound. Reads files of the kernel; changes nothing.

    Args:
        wanted: NUMA nodes of the worker's accelerators, -1 for an unknown node.
        tree: the kernel's directory of NUMA nodes (SYSFS).
        allowed: CPUs that this process may use.
    """
    if min(wanted, default=-1) < 0:
        return NumaBinding(note="the NUMA node of its accelerators is not known")
    cpus: set[int] = set()
    for node in wanted:
        try:
            mine = parse_cpus(Path(tree, f"node{node}", "cpulist").read_text())
        except OSError as error:
            return NumaBinding(note=f"the kernel does not show NUMA node {node} ({error.filename}: {error.strerror})")
        if not mine & set(allowed):
            return NumaBinding(note=f"none of the CPUs of NUMA node {node} is among those that this process may use")
        cpus |= mine & set(allowed)
    try:
        with_memory = parse_cpus(Path(tree, "has_memory").read_text())
    except OSError:
        with_memory = set(wanted)  # an older kernel has no such file
    memory = tuple(node for node in wanted if node in with_memory)  # the kernel refuses nodes that have only CPUs
    missing = [str(node) for node in wanted if node not in memory]
    return NumaBinding(frozenset(cpus), memory, f"NUMA node {', '.join(missing)} has no memory" if missing else "")


def parse_cpus(text: str) -> set[int]:
    """Return the numbers in a list of CPUs in the kernel's format, such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def bind(wanted: Sequence[int], root: str = "") -> str:
    """Bind the calling thread, and threads that it starts later, to the CPUs and memory of NUMA nodes.

    Args:
        wanted: NUMA nodes of the worker's accelerators, -1 for an unknown node.
        root: directory in place of ``/`` (RLINF_ACTORS_PROBE_ROOT), "" for ``/``.

    Returns:
        A line for the worker's log that says what is not bound; "" if everything is bound.

    Raises:
        OSError: the kernel refuses CPUs that it has just listed.
    """
    found = decide(wanted, root + SYSFS, os.sched_getaffinity(0))
    if found.cpus:
        os.sched_setaffinity(0, found.cpus)
    refused = prefer_memory(found.memory) if found.memory else ""
    said = "; ".join(text for text in (found.note, refused) if text)
    if not said:
        return ""
    return f"numa_bind: {said}; {'only its CPUs are bound' if found.cpus else 'this worker is not bound'}"


def prefer_memory(nodes: Sequence[int]) -> str:
    """Let the calling thread, and threads that it starts later, prefer the memory of the NUMA nodes *nodes*.

    Returns:
        Why the kernel refused, "" if it did not.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory cannot be preferred on {platform.machine()}"
    words = max(nodes) // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _LONG_BITS] |= 1 << node % _LONG_BITS
    mode = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_PREFERRED_MANY
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than maxnode says (set_mempolicy(2), "BUGS" of the C library's wrapper).
    size = ctypes.c_ulong(words * _LONG_BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, size):
        return f"the kernel does not let memory be preferred: {os.strerror(ctypes.get_errno())}"
    return ""


LATE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
"""Variables whose values the worker gets by Create, when it has threads already. Room for them is reserved before."""
SLOTS = 8
"""Number of variables that a worker with accelerators can set while it makes process groups."""

_SET_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_OF_AN_INTERPRETER = re.compile(r"/lib(64)?/python3(\d+\.zip|\.\d+(/|$))|/(site|dist)-packages(/|$)")


class ChildStart(msgspec.Struct):
    """What a new process needs to become a worker."""

    fork: packets.Fork
    control: int  # descriptor of the worker's end of the control socket
    entry: str  # module:function that runs the worker
    template: int  # pid of the template, or of the watchdog above the worker; 0 under a profiler, which is the parent
    cgroup: Cgroup
    forked: bool = False  # False: in a new interpreter
    slot: tuple[int, int] = (0, 0)  # address and size in bytes of the worker mark in the environment block
    nofile: int | None = None  # soft limit of open files to restore
    threads: LibraryThreads | None = None
    link: int = -1  # descriptor of the watchdog's end of its socket to the template; -1 without robots
    guarded: Guarded | None = None  # what a robot worker has from its watchdog


def run(start: ChildStart) -> None:
    """Turn this new process into the worker, and run the worker until its end.

    With robots, this process becomes the worker's watchdog instead, and its child the worker. If the process cannot
    become the worker, send StartFailed to the template and raise the error.
    """
    spec = start.fork.spec
    try:
        if spec.claims:
            start = watchdog.start(start, prepare_stopper)
        prepare(start)
        module, _, name = start.entry.partition(":")
        run_worker = getattr(importlib.import_module(module), name)
    except Exception as error:
        with socket.socket(fileno=os.dup(start.control)) as to_template:
            to_template.send(packets.encode(packets.StartFailed(spec.id, f"{type(error).__name__}: {error}")))
        raise
    run_worker(spec, start.fork.place, start.control, *([start.guarded] if start.guarded is not None else []))


def prepare(start: ChildStart) -> None:
    """Set this process up as the worker: its cgroup, environment, limits, directory, import path, streams and so on.

    After a fork all signals are blocked; this unblocks them.
    """
    spec = start.fork.spec
    start.cgroup.enter()  # before it can start other processes
    procfs.brand(spec.id)
    procfs.write_mark(*start.slot, spec.id)
    if start.template:
        procfs.die_with_parent(signal.SIGKILL, start.template)
    procfs.set_name(f"{spec.group}:{spec.rank}")
    procfs.set_title(f"rlinf: {spec.group}:{spec.rank} of {spec.namespace}")
    prepare_stopper(start)
    has_accelerators = start.fork.env.get("ACCELERATOR_TYPE", "NO_ACCEL") != "NO_ACCEL"
    environ_block.reserve(LATE_VARIABLES, SLOTS if has_accelerators else 0)  # the process has no other thread yet
    if start.nofile is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (start.nofile, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    unprotect(Path("/proc/self/oom_score_adj"))
    _reseed()
    if spec.numa_nodes and (said := bind(spec.numa_nodes, start.fork.env.get(PROBE_ROOT, ""))):
        sys.stderr.write(f"{said}\n")
    if start.threads is not None:
        start.threads.restore(start.fork.env)
    gc.enable()


def prepare_stopper(start: ChildStart) -> None:
    """Set this process up for code of the user: session, signals, environment, directory, import path and streams.

    The stopper needs no more, and has no mark of the worker, which it outlives.
    """
    spec = start.fork.spec
    forks.begin()
    if start.forked or start.link >= 0:
        os.setsid()
    _restore_signals()
    _take_environment({**start.fork.env, CHILDREN: socket_path(start.fork.place.run_dir, spec.id)})
    time.tzset()
    _go_to(spec.cwd)
    sys.argv[:] = sys.argv[:1]
    sys.path[:] = import_path(sys.path, spec.sys_path, os.path.exists, spec.code_paths[1:])
    install_if_asked()
    _restore_streams()


def _take_environment(env: Mapping[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():  # most are the same, and a putenv for each would take long
        if os.environ.get(name) != value:
            os.environ[name] = value


def import_path(
    current: list[str], wanted: Iterable[str], exists: Callable[[str], bool], code: Sequence[str] = ()
) -> list[str]:
    """Return sys.path of a worker: this package, then the directories of the driver, then those of the interpreter.

    Directories that belong to the driver's interpreter (library, site-packages) are left out, because the worker may
    run another interpreter.

    Args:
        current: sys.path of this process, which begins with the directory of this package.
        wanted: sys.path of the driver.
        exists: returns True if a directory exists.
        code: directories of the code that the driver has sent, which come before all others.
    """
    known = {*current, *code}
    ours = [
        entry
        for entry in dict.fromkeys(wanted)
        if entry and entry not in known and not _OF_AN_INTERPRETER.search(entry) and exists(entry)
    ]
    return [*current[:1], *code, *ours, *(entry for entry in current[1:] if entry not in code)]


def _restore_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def unprotect(score: Path) -> None:
    """Raise the OOM score in the file *score* to 0 if it is below 0.

    A low score protects agentd from being killed for lack of memory. Workers inherit the score, but must not be
    protected.
    """
    if int(score.read_text()) < 0:
        score.write_text("0")


def _go_to(cwd: str | None) -> None:
    for directory in (cwd, os.environ.get("HOME"), "/"):
        if directory and os.path.isdir(directory) and os.access(directory, os.X_OK):
            os.chdir(directory)
            return


def _restore_streams() -> None:
    """Replace sys.stdout and sys.stderr, which the template has used, by new ones on the same descriptors.

    The new streams are line-buffered, and escape characters that cannot be encoded instead of raising.
    """
    out, err = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for fd in (1, 2)
    )
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
    faulthandler.enable()  # a crash in C code prints its place to stderr, and so into the exit report
    if os.environ.get(CATCH_FAILURE) == "1":
        for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)  # a shell starts programs in the background with SIGQUIT ignored
            faulthandler.register(number, chain=True)  # and then ends the process, unless user code handles it


def _reseed() -> None:
    """Seed the generators that libraries made in the template, or all workers would draw the same numbers.

    `random` does so itself, and torch makes the generators of accelerators when they are first used.
    """
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


class LibraryThreads:
    def __init__(self) -> None:
        self._setters = list(_openblas_setters())

    def restore(self, env: Mapping[str, str]) -> None:
        """Set how many threads OpenBLAS and torch use: by variables in *env*, otherwise the number
        of physical cores.
        """
        cores = _cores()
        for setter in self._setters:
            setter(_count(env, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") or cores)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(_count(env, "OMP_NUM_THREADS", "MKL_NUM_THREADS") or cores)


def _count(env: Mapping[str, str], *names: str) -> int:
    for name in names:
        first = env.get(name, "").split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return int(first)
    return 0


def _cores() -> int:
    """Return the number of physical cores that this process may use."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(f"{cpu}\n")
    return len(siblings)


def _openblas_setters() -> Iterable[Callable[[int], None]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line[line.index("/") :] for line in lines if "openblas" in line and "/" in line}):
        library = ctypes.CDLL(path)
        for name in _SET_THREADS:
            if hasattr(library, name):
                yield getattr(library, name)
                break
