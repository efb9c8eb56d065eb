"""Explain errors of exhausted resources: descriptors, ports, processes and threads. Any thread.

The system's own texts ("Too many open files", "can't start new thread") do not say which limit to raise, or how.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from pathlib import Path

from rlinf_actors.cgroups.roots import PARENT, directory_of, parse_paths, read_mounts
from rlinf_actors.procfs import text_of

AGAIN_S = 0.5
"""Seconds after which callers that lacked file descriptors try again, since no event reports a free descriptor."""
_POLL_S = 0.0001
"""Seconds between two checks of whether the kernel has freed a thread, since no event reports that."""
_FREED_S = 5.0
"""Seconds that the kernel may take to free a thread: microseconds as a rule, more under a debugger."""
NO_THREAD = "can't start new thread"
"""Python's text for a failed pthread_create."""
_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


def explain(error: OSError) -> str:
    """Return a text for people about *error*. If a resource is exhausted, the text names the limit and how to raise it.

    EADDRINUSE is explained as "no TCP port is free", so the program must have asked for any free port.
    """
    said = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"{said}: this process may have {soft}, and at most {hard}; raise both with 'ulimit -n 65536', "
            "LimitNOFILE= in a systemd unit or --ulimit nofile=65536 for docker"
        )
    if error.errno == errno.ENFILE:
        return f"{said}: the whole machine's limit is met; raise it with 'sysctl fs.file-max=…'"
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        ports = "-".join(text_of(_PORT_RANGE).split()) or "a range"
        return (
            f"no TCP port is free: the kernel gives out {ports}, and all are taken; 'ss -tanp' shows by whom, "
            "'sysctl net.ipv4.ip_local_port_range=\"10000 65535\"' adds more"
        )
    if error.errno == errno.EAGAIN:
        return f"{said}: {no_process()}"
    return said


def cause(error: BaseException) -> str:
    """Return which limit on processes and threads caused *error* and how to raise that limit; "" for any other cause.

    *error* may be Python's RuntimeError "can't start new thread" or an OSError with EAGAIN.
    """
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        return no_process()
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:  # of a non-blocking descriptor too
        return _met(Path("/proc"))
    return ""


own_threads: set[int] = set()
"""Idents of the OwnThreads that run. The guard of a robot worker does not hold them."""


class OwnThread(threading.Thread):
    """A thread of the runtime that runs no function of the user."""

    def run(self) -> None:
        """Run the target as one of `own_threads`."""
        own_threads.add(threading.get_ident())
        try:
            super().run()
        finally:
            own_threads.discard(threading.get_ident())


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: the thread cannot be started. The text names the limit that was reached and how to raise it.
    """
    try:
        thread.start()
    except RuntimeError as error:
        why = cause(error)
        raise RuntimeError(f"{error}: {why}" if why else str(error)) from None


def check_threads(count: int) -> None:
    """Check that this process can start *count* threads. A library that failed to start them would abort the process.

    The check starts *count* threads, ends them, and waits until the kernel has freed them.

    Raises:
        RuntimeError: a thread cannot be started (the text names the limit that was reached and how to raise it), or the
            kernel has not freed a thread in time.
    """
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(count)]
    begun = []
    try:
        for thread in threads:
            start(thread)
            begun.append(thread)
    finally:
        over.set()
        for thread in begun:
            thread.join()
    for thread in begun:
        _until_gone(thread)


def _until_gone(thread: threading.Thread) -> None:
    """Wait until the kernel has freed an ended thread, because until then the thread counts against every limit."""
    deadline = time.monotonic() + _FREED_S
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"thread {thread.native_id} has ended, and is still there {_FREED_S:g} s later")
        # No event can replace this sleep: before Linux 6.9 the kernel reports the end of a thread to no one.
        time.sleep(_POLL_S)


def no_process(proc: Path = Path("/proc")) -> str:
    """Return, for people, which limit prevents this process from starting processes or threads, and how to raise it.

    If no limit is known to be reached, the text lists all limits that may be. *proc* is the path of /proc.
    """
    return _met(proc) or (
        "a limit of processes and threads is met: pids.max of a cgroup (TasksMax= of a systemd unit), ulimit -u, "
        "kernel.threads-max, or memory for their stacks; raise it, or start fewer"
    )


def _met(proc: Path) -> str:
    """Return, for people, which limit on processes is reached and what to do; "" if no such limit is found."""
    for directory in _pids_cgroups(proc):
        limit, now, hits = (_count(directory / name) for name in ("pids.max", "pids.current", "pids.events"))
        if limit is None or not (hits or (now is not None and now >= limit)):
            continue
        whose, fix = "", f"raise {directory}/pids.max (TasksMax= of a systemd unit, --pids-limit of a container)"
        if directory.parent.name == PARENT:
            whose, fix = f"pids_limit={limit} of this worker is exhausted: ", "raise pids_limit of launch()"
        return (
            f"{whose}cgroup {directory} may have {limit} processes and threads together, and has {now} now; "
            f"{fix}, or start fewer"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:  # root may have any number
        return ""
    used = _threads_of(proc, os.getuid())
    if used < 0.9 * soft:  # threads may have ended meanwhile
        return ""
    return (
        f"ulimit -u is exhausted: user {os.getuid()} may have {soft} processes and threads, and has {used} now, in all "
        "its sessions and containers; raise it with 'ulimit -u' or limits.conf, LimitNPROC= in a systemd unit or "
        "--ulimit nproc= for docker, or start fewer"
    )


def _pids_cgroups(proc: Path) -> list[Path]:
    """Return the directories of the cgroups that may limit this process's threads, from its own cgroup upwards."""
    try:
        mounts, own = read_mounts(str(proc)), parse_paths((proc / "self/cgroup").read_text())
    except OSError:
        return []
    here = [Path(directory) for name in ("pids", "") if (directory := directory_of(name, own, mounts))]
    return [directory for lowest in here for directory in (lowest, *lowest.parents)]


def _count(file: Path) -> int | None:
    """Return the number in a file of the pids controller; None if the file cannot be read or says "max" (no limit)."""
    word = text_of(str(file)).rpartition(" ")[2].strip()
    return int(word) if word.isdigit() else None  # "max": no limit


def _threads_of(proc: Path, uid: int) -> int:
    count = 0
    for process in proc.iterdir():
        if process.name.isdigit():
            try:
                if process.stat().st_uid == uid:
                    count += sum(1 for _ in (process / "task").iterdir())
            except OSError:  # it has ended
                continue
    return count


def raise_file_limit() -> None:
    """Raise this process's soft limit on file descriptors to the hard limit.

    A process needs two descriptors for each worker that it talks to, and one for each unauthenticated connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
