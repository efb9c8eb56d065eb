"""The stacks of a worker, taken by its template from outside: for a worker whose I/O thread cannot answer.

By a signal: the worker's C code writes them into a pipe (worker.outside_stacks). The output has no end mark: it has
ended when nothing came for QUIET_S. By py-spy: the template starts it, so it runs as the worker's user, and is given
leave to trace by the worker, if the kernel demands that.

House rules: all runs in the template's select loop, and nothing blocks. A signal is sent only to a process that handles
it, since it would end any other. Each question has one answer, which says why if there are no stacks.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import selectors
import signal
import stat
import time
from collections.abc import Callable
from functools import partial

from rlinf_actors import procfs
from rlinf_actors.diagnosis.ptrace import find_py_spy, yama
from rlinf_actors.installed import install_extra
from rlinf_actors.template import stack_texts
from rlinf_actors.template.forked_workers import ForkedWorker
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.stack_values import NATIVE, PY_SPY, SIGNAL, WorkerStacks, stopped
from rlinf_actors.wire.worker_questions import AskWorker, WorkerAnswered
from rlinf_actors.worker import outside_stacks

FIRST_S = 2.0
"""Seconds that the worker has to begin to write its stacks after the signal."""
QUIET_S = 0.25
"""Seconds without output after which the stacks are complete."""
GRANT_S = 1.0
"""Seconds that a worker has to allow py-spy to trace it. py-spy then starts anyway: it may be root."""
PY_SPY_S = 20.0
"""Seconds that py-spy has. With the frames of C code it reads the symbols of all libraries, which may be large."""
AT_ONCE = 4
"""Most processes of py-spy at a time."""
OUTPUT_BYTES = 4 << 20
"""Most bytes of a dump that are read."""


class _Dump:
    """One question: the output that has arrived, and when to stop waiting for more."""

    def __init__(self, worker: ForkedWorker, request: int, level: str) -> None:
        self.worker = worker
        self.request = request
        self.level = level
        self.deadline = math.inf
        self.output: dict[int, bytearray] = {}  # by descriptor: that of the stacks first
        self.go = -1  # descriptor that starts py-spy, -1 once it has started
        self.child = 0  # pid of py-spy

    @property
    def pid(self) -> int:
        return self.worker.inner or self.worker.pid


class OutsideStacks:
    """Takes stacks by a signal and by py-spy.

    Args:
        selector: selector of the template's loop.
        send: sends a packet to agentd.
        tell: sends a packet to the worker that it names.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[WorkerAnswered], None],
        tell: Callable[[packets.AllowTracer], None],
    ) -> None:
        self._selector = selector
        self._send = send
        self._tell = tell
        self._dumps: list[_Dump] = []
        self._waiting: collections.deque[_Dump] = collections.deque()

    def take(self, worker: ForkedWorker | None, packet: AskWorker, level: str) -> None:
        """Answer *packet*, which asks for stacks by *level*, at once or later. *worker* is None if it has ended."""
        if worker is None or worker.status is not None:
            self._send(WorkerAnswered(packet.id, packet.request, WorkerStacks(packet.id, fault="it has ended")))
            return
        dump = _Dump(worker, packet.request, level)
        found = procfs.stat(dump.pid)
        if found is not None and found.state == "T":
            self._fail(dump, stopped(dump.pid))
        elif level == SIGNAL:
            self._signal(dump)
        elif level in (PY_SPY, NATIVE):
            self._waiting.append(dump)
            self._start_next()
        else:
            self._fail(dump, f"there is no level {level!r} of stacks")

    def patience(self) -> float | None:
        """Return after how many seconds `check` must run even if no event occurs, None for never."""
        first = min((dump.deadline for dump in self._dumps), default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def check(self) -> None:
        """End the waits that are over."""
        now = time.monotonic()
        for dump in [dump for dump in self._dumps if dump.deadline <= now]:
            if dump.go >= 0:
                self._go(dump)
            elif dump.level == SIGNAL:
                self._end_signal(dump)
            else:
                procfs.kill(dump.child)  # a child of this process, which has not reaped it: its pipes are open
                self._fail(dump, f"py-spy did not end within {PY_SPY_S:g} s")

    def allowed(self, packet: packets.TracerAllowed) -> None:
        """Handle the answer of a worker that a process may trace it now."""
        for dump in self._dumps:
            if dump.worker.id == packet.id and dump.child == packet.pid and dump.go >= 0:
                self._go(dump)

    def close(self) -> None:
        """Close the descriptors. Called in a forked worker, and at the end of the template."""
        for dump in self._dumps:
            for fd in [*dump.output, *[dump.go] * (dump.go >= 0)]:
                os.close(fd)
        self._dumps.clear()

    # --- by a signal ---

    def _signal(self, dump: _Dump) -> None:
        up, pid = dump.worker.up, dump.pid
        if up is None or up.stack_fd < 0:
            self._fail(dump, "it has no pipe for stacks: it is starting")
            return
        if any(other.pid == pid and other.level == SIGNAL for other in self._dumps):
            self._fail(dump, "another question for its stacks is not answered yet")
            return
        if not handles(pid, outside_stacks.SIGNAL):  # else the signal would end the process
            self._fail(dump, f"its code has taken signal {outside_stacks.SIGNAL}, which asks for stacks")
            return
        try:
            reader = os.open(f"/proc/{pid}/fd/{up.stack_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._fail(dump, f"its pipe for stacks cannot be opened: {error.strerror}")
            return
        if not stat.S_ISFIFO(os.fstat(reader).st_mode):
            os.close(reader)
            self._fail(dump, "its code has closed its pipe for stacks")
            return
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 1 << 16):  # of a signal before, whose stacks came too late
                pass
        self._listen(dump, reader)
        dump.deadline = time.monotonic() + FIRST_S
        self._dumps.append(dump)
        os.kill(pid, outside_stacks.SIGNAL)

    def _end_signal(self, dump: _Dump) -> None:
        (output,) = dump.output.values()
        stacks = stack_texts.of_faulthandler(output.decode("utf-8", "replace"))
        if stacks:
            self._answer(dump, stack_texts.shown(dump.worker.id, SIGNAL, stacks))
        else:
            self._fail(dump, "its process is stopped, or sits in the kernel: signals are not delivered")

    # --- by py-spy ---

    def _start_next(self) -> None:
        while self._waiting and sum(dump.child > 0 for dump in self._dumps) < AT_ONCE:
            self._spy(self._waiting.popleft())

    def _spy(self, dump: _Dump) -> None:
        program = find_py_spy()
        if not program:
            self._fail(dump, f"its node has no py-spy: run '{install_extra('stack')}' there")
            return
        native = ["--native"] * (dump.level == NATIVE)
        command = [program, "dump", "--json", *native, "--pid", str(dump.pid)]
        out, err, go = os.pipe(), os.pipe(), os.pipe()
        dump.child = os.fork()
        if not dump.child:
            _become(command, go[0], out[1], err[1])
        for fd in (out[1], err[1], go[0]):
            os.close(fd)
        dump.go = go[1]
        for fd in (out[0], err[0]):
            self._listen(dump, fd)
        self._dumps.append(dump)
        if yama() == 1:
            dump.deadline = time.monotonic() + GRANT_S
            self._tell(packets.AllowTracer(dump.worker.id, dump.child))
        else:
            self._go(dump)

    def _go(self, dump: _Dump) -> None:
        """Start py-spy, which waits in the child."""
        with contextlib.suppress(BrokenPipeError):
            os.write(dump.go, b"g")
        os.close(dump.go)
        dump.go = -1
        dump.deadline = time.monotonic() + PY_SPY_S

    def _end_spy(self, dump: _Dump) -> None:
        out, err = (output.decode("utf-8", "replace") for output in dump.output.values())
        stacks = stack_texts.of_py_spy(out)
        if stacks:
            self._answer(dump, stack_texts.shown(dump.worker.id, dump.level, stacks))
        else:
            self._fail(dump, why_not(err, dump.pid, yama(), procfs.text_of("/proc/self/status")))

    # --- both ---

    def _listen(self, dump: _Dump, fd: int) -> None:
        os.set_blocking(fd, False)
        dump.output[fd] = bytearray()
        self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, dump, fd))

    def _on_output(self, dump: _Dump, fd: int, _mask: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        output = dump.output[fd]
        output += data[: OUTPUT_BYTES - len(output)]
        if dump.level == SIGNAL and data:
            dump.deadline = time.monotonic() + QUIET_S
        elif not data:
            self._selector.unregister(fd)
            if not any(one in self._selector.get_map() for one in dump.output):
                if dump.level == SIGNAL:
                    self._end_signal(dump)
                else:
                    self._end_spy(dump)

    def _fail(self, dump: _Dump, why: str) -> None:
        self._answer(dump, WorkerStacks(dump.worker.id, fault=why, level=dump.level))

    def _answer(self, dump: _Dump, stacks: WorkerStacks) -> None:
        if dump in self._dumps:
            self._dumps.remove(dump)
        for fd in dump.output:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            os.close(fd)
        if dump.go >= 0:
            os.close(dump.go)
        if dump.child and yama() == 1:
            self._tell(packets.AllowTracer(dump.worker.id, 0))
        self._send(WorkerAnswered(dump.worker.id, dump.request, stacks))
        self._start_next()


def _become(command: list[str], go: int, out: int, err: int) -> None:
    """Turn this forked process into *command*, once a byte comes from *go*. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, go}:
            with contextlib.suppress(OSError):
                os.close(fd)  # the waiting child keeps no descriptor of the template: no end of a worker is hidden
        if os.read(go, 1):
            os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}".encode())
    finally:
        os._exit(1)


def handles(pid: int, number: int) -> bool:
    """Return True if the process *pid* has a handler of the signal *number*."""
    words = procfs.text_of(f"/proc/{pid}/status").partition("\nSigCgt:")[2].split(None, 1)
    return bool(words and int(words[0], 16) >> (number - 1) & 1)


def why_not(error: str, pid: int, scope: int, status: str) -> str:
    """Return why py-spy has shown nothing, and what to do, for people.

    Args:
        error: what py-spy has written to stderr.
        pid: the worker's process.
        scope: kernel.yama.ptrace_scope.
        status: /proc/self/status.
    """
    told = error.partition("Stack backtrace:")[0]  # of Rust
    said = " ".join(told.split())[:300] or "it ended without output"
    if "permission" not in said.lower() and "not permitted" not in said.lower():
        return f"py-spy: {said}"
    by_root = f"or run 'sudo py-spy dump --pid {pid}' on its node"
    if scope == 1:
        return (
            "py-spy may not trace it: kernel.yama.ptrace_scope is 1, and the worker's I/O thread did not allow it. "
            "Start the job with RLINF_ACTORS_PTRACE=1, or run 'sysctl kernel.yama.ptrace_scope=0' as root, " + by_root
        )
    if scope == 2:
        return f"py-spy may not trace it: kernel.yama.ptrace_scope is 2, which is for root. Set it to 1, {by_root}"
    if scope == 3:
        return "py-spy may not trace it: kernel.yama.ptrace_scope is 3, which forbids it until the machine boots again"
    if "\nSeccomp:\t2" in status:
        return (
            "py-spy may not trace it: a seccomp filter, such as a container's, forbids ptrace. Start the container "
            f"with --cap-add SYS_PTRACE, {by_root}"
        )
    return f"py-spy may not trace it: {said}. Its user is another one, or it gave up privileges: {by_root}"
