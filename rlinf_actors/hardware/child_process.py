"""Child processes for code that may hang, crash or print nonsense: a vendor's library, or a user's hardware type.

The probe, agentd's hardware query and `hw scan` call `run_child` in their event loop; it waits for the end of the child
and never blocks the loop. The child's function begins with `probe_child.contain` and ends with `probe_child.finish`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf_actors import procfs

log = logging.getLogger(__name__)

_STACK_S = 0.5
"""Seconds for a hung child to write its stack (faulthandler, on SIGABRT)."""
_KILL_S = 0.5
"""Seconds from SIGKILL until a process is given up as unkillable, in a driver's uninterruptible sleep."""
_MAX_OUTPUT = 1 << 20
"""Bytes of a child's output that are read."""

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


@dataclass(frozen=True)
class ChildEnd:
    """End of a child: its exit code or less signal; None if it was killed for its time, or could not be killed or
    started.
    """

    code: int | None
    output: bytes = b""
    errors: str = ""
    note: str = ""

    @property
    def hung(self) -> bool:
        """True if the child was killed because its time was over."""
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
) -> ChildEnd:
    """Run a function in a child process, wait for its end, and kill the rest of its process group and session.

    Call it from the main thread: the child ends when the thread that started it does. Cancelling kills it.

    Args:
        module: module with ``main(argv)``, or ``module:function`` for another function.
        arguments: follow this process's pid in its ``argv``.
        env: the child's whole environment.
        timeout_s: seconds until the child is killed; the result is there a second later.
        python: the child's interpreter.
        root: directory of rlinf_actors.
        given: the child's standard input.
    """
    # Files instead of pipes: a grandchild that keeps a pipe open, or fills it, cannot hold us up.
    with (
        os.fdopen(os.memfd_create("child-in"), "wb", buffering=0) as question,
        os.fdopen(os.memfd_create("child-out"), "rb") as output,
        os.fdopen(os.memfd_create("child-err"), "rb") as errors,
    ):
        question.write(given)
        question.seek(0)
        try:
            child = subprocess.Popen(  # noqa: ASYNC220 - milliseconds; asyncio's own would wait on a thread
                [python, "-c", _START, root, module, str(os.getpid()), *arguments],
                stdin=question,
                stdout=output,
                stderr=errors,
                env=dict(env),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a variable with a null byte
            return ChildEnd(None, note=f"its process cannot be started: {error}")
        code, note = await _until_end(child, timeout_s)
        return ChildEnd(code, _content(output.fileno()), _content(errors.fileno()).decode(errors="replace"), note)


def fault_of(end: ChildEnd, whose: str, timeout_s: float) -> str:
    """Return the fault of a child that ended like this, "" if it ended well. Pure.

    Args:
        end: the end.
        whose: name of the code that it ran, as the sentence's subject.
        timeout_s: its time limit.
    """
    if end.note:
        return end.note
    if end.code is None:
        return f"{whose} gave no answer within {timeout_s:g} s{_where(end.errors)}"
    if end.code < 0:
        cause = signal.Signals(-end.code).name if -end.code in signal.valid_signals() else f"signal {-end.code}"
        return f"{whose} crashed its process ({cause}){_where(end.errors)}"
    if end.code > 0:
        return f"{whose} ended its process with exit code {end.code}{_last_line(end.errors)}"
    return ""


def _where(errors: str) -> str:
    frame = _FRAME.search(errors)
    return f" in {frame.group(1)}" if frame else _last_line(errors)


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"; its last words: {lines[-1][:300]}" if lines else ""


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
    """True if a child that has ended, and is not reaped yet, ended by a signal or with an exit code."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is None or ended.si_code != os.CLD_EXITED or ended.si_status != 0


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its process group. Call it before the child is reaped: its group number is not reused until
    then.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _kill_session(leader: int) -> None:
    """Kill the tools of a child that could not do so itself. Each has a process group of its own in its session."""
    for pid in procfs.pids():
        stat = procfs.stat(pid)
        if stat is not None and stat.session == leader and stat.state not in "ZX":
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended since
            except PermissionError:
                _log_unkillable(pid)


def _log_unkillable(pid: int) -> None:
    """Log a tool that became another user (sudo, setuid): only that user, or root, can end it."""
    log.warning("process %d, which the hardware probe started, cannot be killed: it became another user's process", pid)


def _reap_orphans(leader: int) -> None:
    """Reap the processes that the child left to this process, if this process is a subreaper, as agentd is."""
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


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, _MAX_OUTPUT), 0)
