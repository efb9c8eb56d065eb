"""agentd's connection to its keeper, the process that starts templates (agentd.keeper). Loop thread only.

agentd.templates asks for processes, agentd.workers for exit statuses. The client starts a keeper when none runs, and
another when the keeper has ended. Nothing here may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from agentd import keeper
from rlinf_actors import procfs
from rlinf_actors.cgroups.worker_cgroup import enter_leaf
from rlinf_actors.net.unix_sockets import peer_of
from rlinf_actors.settings import CLUSTER_MARK, FOR_THE_UNIT_ALONE

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # seconds that a keeper may take to answer, usually a millisecond. A keeper that takes longer is killed
STATUS_S = 0.5  # seconds that the keeper may take to report the exit status of an ended process
END_S = 3.0  # seconds that a keeper without processes may take to end
_NOT_FOR_KEEPER = FOR_THE_UNIT_ALONE | {CLUSTER_MARK}
"""Not inherited by the keeper. A driver kills processes with its cluster mark; the keeper must live to end the rest."""
_STATUSES = 1024  # how many exit statuses are kept for processes whose ends agentd has not noticed yet


class Started(msgspec.Struct, frozen=True):
    """A process that the keeper has started for agentd. `began` is its start in clock ticks since boot."""

    pid: int
    pidfd: int
    began: int


class _StartOrder(msgspec.Struct):
    """A request to the keeper to start a process. The descriptors in `fds` are closed when the keeper has answered or
    the request has failed.
    """

    argv: Sequence[str]
    env: dict[str, str]
    fds: list[int]  # duplicates of the descriptors that the process gets
    started: asyncio.Future[Started]  # gets its result when the keeper answers
    user: dict[str, object] | None = None  # of the process, for keeper.drop; None for the keeper's own user
    sent: int = 0  # number of keepers that have got this request
    number: int = 0  # in the answer

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def fail(self, error: OSError) -> None:
        self.close()
        if not self.started.done():
            self.started.set_exception(error)


def remove_files(path: str) -> None:
    """Remove the files that an ended keeper left: its socket *path*, and the file with its stderr beside it."""
    for name in (path, f"{path}.err"):
        Path(name).unlink(missing_ok=True)


def connect(path: str) -> socket.socket:
    """Connect to the keeper that listens on *path*, without blocking.

    Raises:
        BlockingIOError: the keeper has not accepted connections for long, so that its queue is full.
        OSError: no keeper listens on *path*.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def listener_pid(sock: socket.socket) -> int:
    """Return the pid of the process that listens at the other end of *sock*, or 0 if that process belongs to another
    user.
    """
    pid, uid = peer_of(sock)
    return pid if uid == os.getuid() else 0


def pid_of(path: str) -> int | None:
    """Return the pid of the keeper that listens on *path*, or None if no keeper of this user listens there. Never
    blocks.
    """
    try:
        with connect(path) as sock:
            return listener_pid(sock) or None
    except OSError:
        return None


async def wait_for_end(pidfd: int, timeout_s: float) -> bool:
    """Wait until the process of *pidfd* ends, for at most *timeout_s*. Return True if the process has ended."""
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    loop.add_reader(pidfd, end.set)
    try:
        await asyncio.wait_for(end.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def become_keeper(path: str) -> NoReturn:
    """Replace the program of this process by a keeper that listens on *path*. This process is the main process of the
    unit rlinf-workers@.service.
    """
    if why := enter_leaf():
        log.warning("memory_limit and pids_limit are unavailable: %s", why)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Path(path).unlink(missing_ok=True)  # of a killed keeper; systemd runs one at a time
    listener.bind(path)
    listener.listen(8)
    listener.set_inheritable(True)
    os.execv(sys.executable, [sys.executable, "-I", "-S", keeper.__file__, str(listener.fileno()), path, "stay"])


class KeeperClient:
    """agentd's connection to the keeper. agentd connects when it first needs the keeper, and connects again after the
    end of a keeper.

    Args:
        run_dir: directory for the socket of a keeper that agentd starts itself.
        keep: True if templates go on when this agentd ends.
        of_unit: socket of the keeper in rlinf-workers@.service; "" if agentd starts a keeper itself.

    Attributes:
        pid: the keeper's pid; 0 if unknown.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, run_dir: Path, keep: bool, of_unit: str = "") -> None:
        self.pid = 0
        self._loop = loop
        self._path = of_unit or str(run_dir / "keeper")
        self._keep = keep
        self._starts = not of_unit
        self._hint = ": look at systemctl status rlinf-workers@USER" if of_unit else ""
        self._socket: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._ending: dict[int, subprocess.Popen[bytes]] = {}  # keepers that closed their sockets, by pidfd
        self._orders = deque[_StartOrder]()  # not answered yet
        self._numbers = count(1)
        self._greeted = False
        self._silence: asyncio.TimerHandle | None = None
        self._unreaped: set[int] = set()  # ended processes whose statuses no keeper told
        self._statuses: dict[int, int] = {}
        self._waiting: dict[int, Callable[[int | None], None]] = {}

    def begin(self) -> None:
        """Connect to the keeper; if agentd starts its keepers itself and none runs, start one. Do not wait for the
        keeper's answer. Raise OSError if the keeper cannot be reached or started.
        """
        if self._socket is not None:
            return
        try:
            made = connect(self._path)
            # the credentials of our own keeper's socket are of the agentd that made the socket
            self.pid = 0 if self._starts else listener_pid(made)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            if not self._starts:
                what = "the keeper on {} does not answer" if error.errno == errno.EAGAIN else "no keeper listens on {}"
                raise ConnectionRefusedError(what.format(self._path) + self._hint) from None
            made = self._start_keeper()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has just ended: _on_readable notices
            made.send(json.dumps({"do": "hello", "keep": self._keep}).encode())
        self._socket = made
        self._loop.add_reader(made.fileno(), self._on_readable)
        self._expect()

    def start(
        self, argv: Sequence[str], env: dict[str, str], fds: Sequence[int], user: dict[str, object] | None = None
    ) -> asyncio.Future[Started]:
        """Ask the keeper to start a process. If the keeper does not answer, kill it and ask another keeper; this is
        done once.

        Args:
            argv: command line; argv[0] is the path of the program.
            env: whole environment of the process.
            fds: descriptor 3 of the process, the file for its stdout and stderr, and perhaps its descriptors 4 and 5.
            user: the user of the process (User.start_order); None for the keeper's own.

        Returns:
            A future of the process. The future raises OSError if the process cannot be started. If the future is
                cancelled and the process starts later, the process is killed.

        Raises:
            OSError: the keeper cannot be reached.
        """
        order = _StartOrder(argv, env, [], self._loop.create_future(), user, number=next(self._numbers))
        try:
            for fd in fds:
                order.fds.append(os.dup(fd))
            self._send(order)
        except OSError:
            order.close()
            raise
        return order.started

    def ready(self, pid: int) -> None:
        """Tell the keeper that the template with this pid has finished its imports. From now on the template itself
        notices the end of agentd, so the keeper need not kill it then.
        """
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the keeper has ended
                self._socket.send(json.dumps({"do": "ready", "pid": pid}).encode())

    def when_ended(self, pids: Iterable[int], done: Callable[[dict[int, int]], None]) -> None:
        """Ask for the wait statuses of ended processes. *done* is called with the statuses by pid; a status that stays
        unknown is left out.

        *done* is called at once if all statuses are known or no keeper is connected. Otherwise it is called when the
        keeper has sent the statuses, after STATUS_S at the latest.
        """
        wanted = set(pids)
        found = {pid: self._statuses.pop(pid) for pid in wanted & self._statuses.keys()}
        self._unreaped |= wanted - found.keys()
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
        """Disconnect from the keeper, which runs on for the next agentd."""
        self._disconnect()
        self._forget()

    async def close(self) -> None:
        """Disconnect from the keeper after the end of all templates. If agentd started the keeper, wait for its end
        too.
        """
        pidfd = -1
        with contextlib.suppress(OSError):
            pidfd = procfs.pidfd_of(self.pid) if self.pid and self._starts else -1
        self._disconnect()
        if pidfd >= 0:
            try:
                if not await wait_for_end(pidfd, END_S):
                    log.warning("keeper %d runs on: a process that it was to end cannot be killed", self.pid)
            finally:
                os.close(pidfd)
            remove_files(self._path)
        self._forget()

    # --- the keeper's process ---

    def _start_keeper(self) -> socket.socket:
        """Start a keeper and return a connection to it. The connection is made before the keeper runs, because a keeper
        to which no agentd is connected ends.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            Path(self._path).unlink(missing_ok=True)  # of a keeper that has ended
            listener.bind(self._path)
            listener.listen(8)
            connected = connect(self._path)
            try:
                with open(f"{self._path}.err", "ab") as err:  # it outlives agentd, and the reader of agentd's stderr
                    self._child = subprocess.Popen(
                        [sys.executable, "-I", "-S", keeper.__file__, str(listener.fileno()), self._path],
                        stdin=subprocess.DEVNULL,
                        stdout=err,
                        stderr=err,
                        cwd="/",
                        env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_KEEPER},
                        pass_fds=(listener.fileno(),),
                        start_new_session=True,
                    )
            except OSError:
                connected.close()
                raise
        self.pid = self._child.pid
        return connected

    def _on_keeper_end(self, why: str) -> None:
        """Handle the end or silence of the keeper: send the unanswered requests to another keeper. A request that has
        already been sent to two keepers fails with the reason *why*.
        """
        orders, self._orders = self._orders, deque()
        self._disconnect()
        self._reap()
        for order in orders:
            try:
                if order.sent > 1:
                    raise ConnectionAbortedError(why + self._hint)
                self._send(order)
            except OSError as error:
                order.fail(error)

    def _reap(self) -> None:
        """Reap the keeper that agentd started and that has closed its connection. If the keeper still runs, reap it
        when it ends.
        """
        child, self._child = self._child, None
        if child is None or child.poll() is not None:
            self._reap_what_it_left()
            return
        try:
            pidfd = procfs.pidfd_of(child.pid)
        except OSError:  # no descriptor is left: it stays a zombie until agentd ends
            child.returncode = 0
            return
        self._ending[pidfd] = child
        self._loop.add_reader(pidfd, self._on_child_end, pidfd)

    def _on_child_end(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._ending.pop(pidfd).wait()
        self._reap_what_it_left()

    def _reap_what_it_left(self) -> None:
        """Reap the ended processes that an ended keeper had not reaped. The kernel has made agentd their parent."""
        for pid in self._unreaped:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._unreaped.clear()

    def _forget(self) -> None:
        """Stop watching all keepers, because they have ended or outlive this agentd. Reap the keepers and processes
        that have ended.
        """
        for pidfd in self._ending:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        for child in (self._child, *self._ending.values()):
            if child is not None:
                child.returncode = child.poll() or 0
        self._child = None
        self._ending.clear()
        self._reap_what_it_left()

    # --- packets ---

    def _send(self, order: _StartOrder) -> None:
        """Send a request to the keeper."""
        self.begin()
        assert self._socket is not None
        order.sent += 1
        with open(os.memfd_create("start"), "w+b") as file:
            packet = {"argv": list(order.argv), "env": order.env, "user": order.user, "number": order.number}
            file.write(json.dumps(packet).encode())
            file.flush()
            file.seek(0)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # as in `begin`
                socket.send_fds(self._socket, [b'{"do": "start"}'], [file.fileno(), *order.fds])
        self._orders.append(order)
        self._expect()

    def _expect(self) -> None:
        """If the keeper owes an answer, start the timer after which the keeper is killed because it does not answer."""
        if self._silence is None and (self._orders or not self._greeted):
            self._silence = self._loop.call_later(ANSWER_S, self._on_silence)

    def _on_silence(self) -> None:
        log.error("keeper %d does not answer; it is killed, and another one is asked when one is needed", self.pid)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._starts:
            remove_files(self._path)  # a keeper that has not even said hello must not be found again
        self._on_keeper_end("the keeper does not answer")

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data, fds = keeper.receive(self._socket, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds = b"", []
        if not data:
            log.warning("keeper %d has ended; the templates that it started go on", self.pid)
            self._on_keeper_end("the keeper has ended")
            return
        self._unexpect()
        self._take(json.loads(data), fds)
        self._expect()

    def _unexpect(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _answered(self, packet: dict[str, Any]) -> _StartOrder:
        """Remove and return the request that the keeper's *packet* answers."""
        order = next(one for one in self._orders if one.number == packet["number"])
        self._orders.remove(order)
        return order

    def _take(self, packet: dict[str, Any], fds: list[int]) -> None:
        if "keeper" in packet:
            self.pid, self._greeted = packet["keeper"], True
        elif "errno" in packet:
            text = packet.get("text") or os.strerror(packet["errno"])
            self._answered(packet).fail(OSError(packet["errno"], text))
        elif "pid" in packet:
            order = self._answered(packet)
            if not fds:  # no descriptor was left for it; the process ends because its socket is closed
                order.fail(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            elif order.started.done():
                signal.pidfd_send_signal(fds[0], signal.SIGKILL)
                os.close(fds[0])
            else:
                order.started.set_result(Started(packet["pid"], fds[0], packet["began"]))
            order.close()
        elif "ended" in packet:
            pid, status = packet["ended"], packet["status"]
            self._unreaped.discard(pid)
            told = self._waiting.pop(pid, None)
            if told is not None:
                told(status)
                return
            self._statuses[pid] = status
            while len(self._statuses) > _STATUSES:
                del self._statuses[next(iter(self._statuses))]

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._greeted = False
        self._unexpect()
        while self._orders:
            self._orders.pop().close()
        self._statuses.clear()
        waiting, self._waiting = self._waiting, {}
        for told in waiting.values():
            told(None)
