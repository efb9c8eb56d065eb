"""The start of a worker under a profiler: the template starts the profiler, and the profiler starts the worker.

A profiler need not pass descriptors on, and the worker's pid is not that of the process that the template has started.
So the worker connects to a socket of the template. It gets its control socket and its Fork packet there, and the kernel
tells its pid, which agentd then watches and signals in the place of the profiler's.

The profiler is the template's child, and leads the session. The worker has ended when its control socket is
closed. The profiler then has a limited time to write its report (ForkedWorkers). agentd counts the worker as ended when
the profiler has ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_actors import procfs
from rlinf_actors.net.unix_sockets import peer_of
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.endings import LEFT, cut
from rlinf_actors.wire.values import ExitReport

if TYPE_CHECKING:
    from rlinf_actors.template.forked_workers import ForkedWorker

CONNECT_S = 60.0
"""Most seconds for which a started worker waits for its control socket."""


class WrappedStart:
    """Waits for the worker that a profiler starts, and hands it its control socket. In the template's select loop.

    Args:
        selector: selector of the loop.
        worker: the worker, whose profiler is not started yet.
        on_started: called with the worker when its pid is known (`ForkedWorker.inner`).
    """

    def __init__(
        self, selector: selectors.BaseSelector, worker: ForkedWorker, on_started: Callable[[ForkedWorker], None]
    ) -> None:
        self.path = f"{worker.fork.place.run_dir}/w/{worker.id}_start"
        self._selector = selector
        self._worker = worker
        self._on_started = on_started
        self._packet = os.memfd_create("fork")
        worker.opened.callback(os.close, self._packet)
        os.write(self._packet, packets.encode(worker.fork))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker.opened.callback(self.listener.close)
        self.listener.setblocking(False)
        self.listener.bind(self.path)
        self.listener.listen(1)
        selector.register(self.listener, selectors.EVENT_READ, self._connected)

    def _connected(self, _mask: int) -> None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        with sock:
            pid, uid = peer_of(sock)
            if uid != os.getuid() or pid not in procfs.subtree(self._worker.pid):
                return  # a process of this user that is not the worker: it gets nothing
            os.lseek(self._packet, 0, os.SEEK_SET)
            with contextlib.suppress(OSError):  # it ended meanwhile
                socket.send_fds(sock, [b"1"], [self._worker.child.fileno(), self._packet])
        self.close()
        self._worker.child.close()
        self._worker.inner = pid
        self._on_started(self._worker)

    def close(self) -> None:
        """Stop waiting. May be called again."""
        if self.listener.fileno() < 0:
            return
        self._selector.unregister(self.listener)
        self.listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def connect(path: str) -> tuple[int, int]:
    """Return the descriptors of the control socket and of the Fork packet, in the worker. Blocks.

    Raises:
        OSError: the template has ended, or does not answer within CONNECT_S.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(CONNECT_S)
        sock.connect(path)
        _, fds, _, _ = socket.recv_fds(sock, 1, 2)
    if len(fds) != 2:
        raise ConnectionError("the template has refused this process")
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds[0], fds[1]


def exit_report(worker: ForkedWorker, oom: str, left: bool) -> ExitReport:
    """Return the report of how a worker ended, for agentd.

    The exit code of a profiler is that of the worker; 128 and a signal's number stand for that signal.

    Args:
        worker: the worker, which has ended.
        oom: whether the process was killed for lack of memory: "yes", "suspected" or "no".
        left: True if a process that the worker started could not be killed.
    """
    assert worker.status is not None
    code = worker.status.si_status
    exited = worker.status.si_code == os.CLD_EXITED
    if worker.fork.wrapper and exited and 128 < code <= 128 + signal.SIGRTMAX:
        code, exited = code - 128, False
    reasons = [worker.failure] if worker.failure else []
    if not worker.up and not worker.failure:
        how = f"exit code {code}" if exited else signal.strsignal(code) or f"signal {code}"
        reasons.append(f"it ended ({how}) before it was ready")
    if left:
        reasons.append(LEFT)
    reasons += [f"output was lost: {pump.fault}" for pump in (worker.out, worker.err) if pump.fault]
    report = ExitReport(
        kind=("exited" if exited else "signalled") if worker.up else "start_failed",
        exit_code=code if exited else None,
        signal=None if exited else code,
        oom=oom,
        stderr_tail=worker.err.tail.lines(),
        reason="; ".join(reasons),
    )
    return cut(report)
