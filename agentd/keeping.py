"""agentd's connection to its keeper, the process that starts templates; see agentd.keeper."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from agentd import keeper
from rlinf_actors import procfs
from rlinf_actors.cgroups.worker import enter_leaf
from rlinf_actors.settings import CLUSTER_MARK, FOR_THE_UNIT_ALONE

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long a keeper may take to start a process. It takes a millisecond; one that is stopped is killed then."""
STATUS_S = 0.5
"""How long after the end of a process its status may come: the keeper may have to wake first."""
END_S = 3.0
"""How long the keeper's own end is waited for, when nothing is left that it keeps."""
REAP_S = 1.0
"""How long a keeper may take to end after it has closed its socket."""
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
_NOT_FOR_IT = FOR_THE_UNIT_ALONE | {CLUSTER_MARK}
"""By the mark a driver finds what it kills of a private cluster; the keeper ends what is left, and then itself."""
_STATUSES = 1024
"""Statuses that are remembered: of processes whose ends agentd has not seen yet."""


@dataclass(frozen=True)
class Started:
    """A process that the keeper has started: its pidfd, and when it began (clock ticks since boot)."""

    pid: int
    pidfd: int
    began: int


def remove_files(path: str) -> None:
    """Remove what a keeper that is gone left: its socket, and what it wrote."""
    for name in (path, f"{path}.err"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def pid_of(path: str) -> int | None:
    """Return the pid of the keeper that listens there, None if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(path)
        except OSError:
            return None
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid if uid == os.getuid() else None


def become_keeper(path: str) -> NoReturn:
    """Turn this process, the main one of rlinf-workers@.service, into a keeper that listens there.

    Raises:
        OSError: it cannot.
    """
    if why := enter_leaf():
        log.warning("memory_limit and pids_limit are unavailable: %s", why)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of one that was killed; systemd runs one at a time
    listener.bind(path)
    listener.listen(8)
    listener.set_inheritable(True)
    os.execv(sys.executable, [sys.executable, "-I", "-S", keeper.__file__, str(listener.fileno()), path, "stay"])


class Keeping:
    """The connection; made when it is first needed, and again when the keeper has ended. Loop thread only.

    Args:
        loop: agentd's.
        run_dir: where the keeper's socket is, if the keeper is this agentd's own.
        keep: whether templates go on without this agentd.
        of_unit: the socket of rlinf-workers@.service; "" without that unit: then agentd starts a keeper itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, run_dir: Path, keep: bool, of_unit: str = "") -> None:
        self.pid = 0
        self._loop = loop
        self._path = of_unit or str(run_dir / "keeper")
        self._keep = keep
        self._starts = not of_unit
        self._socket: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._statuses: dict[int, int] = {}
        self._waiting: dict[int, Callable[[int | None], None]] = {}

    def begin(self) -> None:
        """Connect to the keeper, and start one where there is none. Returns before it runs.

        Raises:
            OSError: there is none, and none can be started.
        """
        if self._socket is not None:
            return
        try:
            self._socket = self._connect()
        except (FileNotFoundError, ConnectionRefusedError):
            if not self._starts:
                text = f"no keeper listens on {self._path}: look at systemctl status rlinf-workers@USER"
                raise ConnectionRefusedError(text) from None
            self._socket = self._start_keeper()
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def start(self, argv: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> Started:
        """Have the keeper start a process. Blocks for that; a keeper that does not answer is killed.

        Args:
            argv: argv[0] is the path of the program.
            env: its whole environment.
            fds: its descriptor 3, the file that stdout and stderr go to, and, if there is one, its descriptor 4.

        Raises:
            OSError: it cannot be started.
        """
        for attempt in range(2):
            self.begin()
            try:
                answer, pidfd = self._ask(argv, env, fds)
            except (ConnectionError, BrokenPipeError):
                self._lose()
                self._reap()
                if attempt:
                    raise
                continue  # it ended as nobody needed it; there is another one next
            if "errno" in answer:
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            return Started(answer["pid"], pidfd, answer["began"])
        raise AssertionError("unreachable")

    def ready(self, pid: int) -> None:
        """This template listens to its agentd; the keeper need not end it when that is gone."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # a keeper that has ended needs to know nothing
                self._socket.send(json.dumps({"do": "ready", "pid": pid}).encode())

    def when_ended(self, pids: Iterable[int], done: Callable[[dict[int, int]], None]) -> None:
        """Call *done* with the wait statuses of these processes, which have ended, as far as the keeper tells them.

        It is called at once where all are known, and STATUS_S later where the keeper does not tell.
        """
        wanted = set(pids)
        found = {pid: self._statuses.pop(pid) for pid in wanted & self._statuses.keys()}
        missing = wanted - found.keys() if self._socket is not None else set[int]()
        if not missing:
            done(found)
            return

        def finish() -> None:
            timer.cancel()
            for pid in missing:
                self._waiting.pop(pid, None)
            done(found)

        def told(pid: int, status: int | None) -> None:
            missing.discard(pid)
            if status is not None:
                found[pid] = status
            if not missing:
                finish()

        timer = self._loop.call_later(STATUS_S, finish)
        self._waiting.update({pid: partial(told, pid) for pid in missing})

    def abandon(self) -> None:
        """Let go of the keeper: the next agentd finds it."""
        self._lose()
        if self._child is not None:
            self._child.returncode = self._child.poll() or 0  # it outlives us; nobody waits for it

    async def close(self) -> None:
        """Let go of the keeper, and wait for its end if it is this agentd's own: nothing is left that it keeps."""
        pidfd = -1
        with contextlib.suppress(OSError):
            pidfd = procfs.pidfd_of(self.pid) if self.pid and self._starts else -1
        self._lose()
        if pidfd >= 0:
            end = asyncio.Event()
            self._loop.add_reader(pidfd, end.set)
            try:
                await asyncio.wait_for(end.wait(), END_S)
            except asyncio.TimeoutError:
                log.warning("keeper %d runs on: a process that it was to end cannot be killed", self.pid)
            finally:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)
            remove_files(self._path)
        self._reap()

    # --- the keeper's process ---

    def _connect(self) -> socket.socket:
        """Raises OSError where nobody listens."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            made.connect(self._path)
            made.setblocking(False)
            made.send(json.dumps({"do": "hello", "keep": self._keep}).encode())
        except OSError:
            made.close()
            raise
        return made

    def _start_keeper(self) -> socket.socket:
        """Start a keeper that finds this connection waiting, so that it never runs without an agentd."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # of one that is gone
            listener.bind(self._path)
            listener.listen(8)
            connected = self._connect()
            try:
                with open(f"{self._path}.err", "ab") as err:  # it outlives us, and whoever reads what we write
                    self._child = subprocess.Popen(
                        [sys.executable, "-I", "-S", keeper.__file__, str(listener.fileno()), self._path],
                        stdin=subprocess.DEVNULL,
                        stdout=err,
                        stderr=err,
                        cwd="/",
                        env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT},
                        pass_fds=(listener.fileno(),),
                        start_new_session=True,
                    )
            except OSError:
                connected.close()
                raise
        self.pid = self._child.pid
        return connected

    def _reap(self) -> None:
        """Wait for a keeper of ours that has closed its socket: that is the last that it does."""
        if self._child is not None:
            try:
                self._child.wait(REAP_S)
            except subprocess.TimeoutExpired:
                self._child.returncode = 0  # it let go of us, and lives
            self._child = None

    # --- packets ---

    def _ask(self, argv: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> tuple[dict[str, int], int]:
        """Raises ConnectionError if the keeper ends, or is ended, before it answers."""
        assert self._socket is not None
        with open(os.memfd_create("start"), "w+b") as order:
            order.write(json.dumps({"argv": list(argv), "env": env}).encode())
            order.flush()
            order.seek(0)
            socket.send_fds(self._socket, [b'{"do": "start"}'], [order.fileno(), *fds])
        deadline = time.monotonic() + ANSWER_S
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            packet, fds = self._receive()
            if packet is None:
                continue
            if "pid" in packet or "errno" in packet:
                return packet, fds[0] if fds else -1
            self._take(packet)
        log.error("keeper %d does not answer; it is killed, and another one is started", self.pid)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._starts:
            remove_files(self._path)  # one that has not even said who it is must not be found again
        raise ConnectionAbortedError(errno.ECONNABORTED, "its keeper does not answer")

    def _receive(self) -> tuple[dict[str, int] | None, list[int]]:
        """One packet, None if there is none now. Raises ConnectionError at the end."""
        assert self._socket is not None
        try:
            data, fds = keeper.receive(self._socket, 1)
        except BlockingIOError:
            return None, []
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "its keeper has ended")
        return json.loads(data), fds

    def _on_readable(self) -> None:
        try:
            packet, _ = self._receive()
        except ConnectionError:
            log.warning("keeper %d has ended; the templates that it started go on", self.pid)
            self._lose()
            self._reap()
            return
        if packet is not None:
            self._take(packet)

    def _take(self, packet: dict[str, int]) -> None:
        if "keeper" in packet:
            self.pid = packet["keeper"]
        elif "ended" in packet:
            pid, status = packet["ended"], packet["status"]
            told = self._waiting.pop(pid, None)
            if told is not None:
                told(status)
                return
            self._statuses[pid] = status
            while len(self._statuses) > _STATUSES:
                del self._statuses[next(iter(self._statuses))]

    def _lose(self) -> None:
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._statuses.clear()
        waiting, self._waiting = self._waiting, {}
        for told in waiting.values():
            told(None)
