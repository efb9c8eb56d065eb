"""Run code that may hang, crash or print nonsense (a vendor's library, a user's hardware type) in a child process.

The probe, agentd's hardware query and `hw scan` call `run_child` in their event loop. It waits until the child has
ended, without blocking the loop. The function that runs in the child begins with `probe_child.contain` and ends with
`probe_child.finish`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from rlinf_actors import procfs
from rlinf_actors.hardware.vendors.machine import last_words, signal_name

log = logging.getLogger(__name__)

_STACK_S = 0.5
"""Seconds that a hung child gets to write its stack, which faulthandler does on SIGABRT."""
_KILL_S = 0.5
"""Seconds after SIGKILL until a process counts as unkillable (in the uninterruptible sleep of a device driver)."""
_MAX_OUTPUT = 1 << 20
"""Largest number of bytes that are read from a child's standard output, and from its standard error."""
_MAX_HELD = 64 << 20
"""Most bytes of each of them that are held in memory: a further write of the child fails."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = """
import sys
root, module = sys.argv[1:3]
path = [entry for entry in sys.path if entry]  # nothing in the working directory stands in for a module of ours
sys.path[:] = path if root in path else [root, *path]  # the child uses this very package, however the parent found it
import importlib
module, _, function = module.partition(":")
getattr(importlib.import_module(module), function or "main")(sys.argv[3:])
"""
_FRAME = re.compile(r'^\s*File ".*", line \d+ in (\w+)', re.MULTILINE)


class ChildEnd(msgspec.Struct, frozen=True):
    """The result of `run_child`: how the child process ended, and what it wrote to standard output and error."""

    code: int | None  # minus the number of a signal; None if it exceeded its limit, or could not be started or killed
    output: bytes = b""
    errors: str = ""
    note: str = ""  # why the child could not be started or killed

    @property
    def hung(self) -> bool:
        """True if the child was killed because it exceeded its time limit."""
        return self.code is None and not self.note


async def run_child(
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    python: str = sys.executable,
    root: str = _ROOT,
    given: bytes = b"",
    through: Sequence[str] = (),
    fds: Sequence[int] = (),
) -> ChildEnd:
    """Run ``main(argv)`` of *module* in a child process, wait for its end, and kill what is left of its process group.

    Call this from the main thread, because the child is killed when the thread that started it ends. The child is also
    killed if this call is cancelled.

    Args:
        module: a module, or ``module:function`` for another function than ``main``.
        arguments: the rest of the function's *argv*, whose first element is the pid of this process.
        env: the whole environment of the child.
        timeout_s: seconds until the child is killed; this function returns at most about a second later.
        python: the child's interpreter.
        root: directory from which the child imports the package rlinf_actors.
        given: bytes that the child can read from its standard input.
        through: command line to which that of *python* is appended: the program that executes *python*. This function
            waits for the execution of what it starts, so a file that another user can hold up goes through another one.
        fds: descriptors that the child inherits.
    """
    # Files instead of pipes: a grandchild that keeps a pipe open, or fills it, cannot hold us up.
    with (
        os.fdopen(os.memfd_create("child-in"), "wb", buffering=0) as question,
        os.fdopen(_bounded_file("child-out"), "rb") as output,
        os.fdopen(_bounded_file("child-err"), "rb") as errors,
    ):
        question.write(given)
        question.seek(0)
        try:
            child = subprocess.Popen(  # noqa: ASYNC220 - milliseconds; asyncio's own would wait on a thread
                [*through, python, "-c", _START, root, module, str(os.getpid()), *arguments],
                stdin=question,
                stdout=output,
                stderr=errors,
                env=dict(env),
                start_new_session=True,
                pass_fds=fds,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a variable with a null byte
            return ChildEnd(None, note=f"its process cannot be started: {error}")
        code, note = await _until_end(child, timeout_s)
        return ChildEnd(code, _content(output.fileno()), _content(errors.fileno()).decode(errors="replace"), note)


def fault_of(end: ChildEnd, whose: str, timeout_s: float) -> str:
    """Return a sentence that says how a child failed; "" if the child ended with exit code 0.

    *whose* names the code that the child ran, as the subject of the sentence; *timeout_s* is the child's time limit.
    """
    if end.note:
        return end.note
    if end.code is None:
        return f"{whose} gave no answer within {timeout_s:g} s{_where(end.errors)}"
    if end.code < 0:
        return f"{whose} crashed its process ({signal_name(-end.code)}){_where(end.errors)}"
    if end.code > 0:
        return f"{whose} ended its process with exit code {end.code}{last_words(end.errors)}"
    return ""


def _where(errors: str) -> str:
    frame = _FRAME.search(errors)
    return f" in {frame.group(1)}" if frame else last_words(errors)


async def _until_end(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[int | None, str]:
    pidfd = os.pidfd_open(child.pid)
    try:
        in_time = gone = await _ended(pidfd, timeout_s)
        if not in_time:
            child.send_signal(signal.SIGABRT)
            await _ended(pidfd, _STACK_S)
        _kill_group(child)
        if not in_time or _has_failed(child.pid):  # one that ends well has ended its tools
            _kill_session(child.pid)
        gone = gone or await _ended(pidfd, _KILL_S)
        if not gone:
            return None, f"it hangs in a device driver, and process {child.pid} cannot be killed"
        code = child.wait()
        _reap_orphans(child.pid)
        return (code if in_time else None), ""
    except BaseException:
        _kill_group(child)
        _kill_session(child.pid)
        if procfs.has_ended(pidfd, _KILL_S):
            child.wait()
            _reap_orphans(child.pid)
        raise
    finally:
        os.close(pidfd)


async def _ended(pidfd: int, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        loop.remove_reader(pidfd)  # level-triggered: it would fire until the process is reaped
        ended.set_result(None)

    loop.add_reader(pidfd, resolve)
    try:
        return bool((await asyncio.wait([ended], timeout=timeout_s))[0])
    finally:
        loop.remove_reader(pidfd)


def _has_failed(pid: int) -> bool:
    """Return True if a child ended by a signal or with a nonzero exit code, or still runs.

    The child must not be reaped yet.
    """
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is None or ended.si_code != os.CLD_EXITED or ended.si_status != 0


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's process group.

    The child must not be reaped yet, because after that another process group may have the same id.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _kill_session(leader: int) -> None:
    """Kill all processes in the session of *leader*, a child that failed.

    They are tools that the child left running, each in its own process group.
    """
    for pid in procfs.pids():
        stat = procfs.stat(pid)
        if stat is not None and stat.session == leader and not stat.ended:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended since
            except PermissionError:
                _log_unkillable(pid)


def _log_unkillable(pid: int) -> None:
    """Log that this process may not kill process *pid*, which became another user's process (sudo, setuid)."""
    log.warning("process %d, which the hardware probe started, cannot be killed: it became another user's process", pid)


def _reap_orphans(leader: int) -> None:
    """Kill and reap the processes that the ended child *leader* left, if this process has become their parent.

    The kernel makes this process their parent only if it is a subreaper.
    """
    for pid in procfs.children(os.getpid()):
        stat = procfs.stat(pid)
        if stat is None or stat.session != leader:
            continue
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if procfs.has_ended(pidfd, _KILL_S):
                os.waitpid(pid, 0)
        except PermissionError:
            _log_unkillable(pid)
        finally:
            os.close(pidfd)


def _bounded_file(name: str) -> int:
    """Return the descriptor of a file in memory to which any program can write at most _MAX_HELD bytes."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _MAX_HELD)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _content(fd: int) -> bytes:
    return os.pread(fd, _MAX_OUTPUT, 0).rstrip(b"\0")
