"""A template process as agentd sees it: its start, its socket, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path

import rlinf_actors
from agentd.launch import Key
from rlinf_actors.net import faultpoints
from rlinf_actors.wire import spawn

_SO_SNDBUFFORCE = 32
_TURN = 64
"""Packets taken before the loop gets a turn."""
_STDERR_LINES = 20


class Template:
    """One template process. Loop thread only.

    Args:
        loop: watches its socket and its end.
        key: what it serves.
        command: argv for a given fd, which the process inherits.
        env: its environment.
        inherited: fds that it inherits besides.
        err_path: file for what it writes itself; removed at its end.
        on_packet: called with each packet.
        on_end: called once, after the last packet, when the process is gone; it is reaped then.

    Attributes:
        ready: it said TemplateReady.
        failure: what is wrong with its interpreter, "" while nothing is known to be.

    Raises:
        OSError: the interpreter cannot be executed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: Key,
        command: Callable[[int], list[str]],
        env: dict[str, str],
        inherited: tuple[int, ...],
        err_path: str,
        on_packet: Callable[[Template, spawn.ToAgent], None],
        on_end: Callable[[Template], None],
    ) -> None:
        self.key = key
        self.ready = False
        self.failure = ""
        self.gone = False
        self._loop = loop
        self._err_path = err_path
        self._on_packet = on_packet
        self._on_end = on_end
        self._outgoing: deque[bytes] = deque()
        self._buffer = memoryview(bytearray(spawn.MAX_PACKET))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.callback(self._socket.close)
            with theirs, open(err_path, "wb") as err:
                stack.callback(os.unlink, err_path)
                if faultpoints.active is not None:
                    faultpoints.active.start("spawn.template", key.interpreter)
                self._process = subprocess.Popen(
                    command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=err,
                    stderr=err,
                    cwd="/",
                    env=env,
                    pass_fds=(theirs.fileno(), *inherited),
                    start_new_session=True,
                )
            stack.pop_all()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._socket.setblocking(False)
        _widen(self._socket)
        loop.add_reader(self._socket.fileno(), self._on_readable)
        loop.add_reader(self._pidfd, self._on_gone)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, packet: spawn.ToTemplate) -> None:
        """Send, or queue until there is room.

        Raises:
            OSError: the packet is larger than the kernel lets a packet be.
        """
        data = spawn.encode(packet)
        if self.gone:
            return
        if self._outgoing:
            self._outgoing.append(data)
        elif not self._try_send(data):
            self._outgoing.append(data)
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def kill(self) -> None:
        """End the process at once; its workers get SIGKILL from the kernel."""
        if not self.gone:
            self._process.kill()

    def last_words(self) -> str:
        """How it ended and the last lines that it wrote."""
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        lines = self._stderr[-_STDERR_LINES:]
        return f"{how}; it wrote:\n" + "\n".join(lines) if lines else how

    def _try_send(self, data: bytes) -> bool:
        try:
            self._socket.send(data)
        except BlockingIOError:
            return False
        except ConnectionError:
            pass  # it has ended; its pidfd says so next
        return True

    def _on_writable(self) -> None:
        while self._outgoing and self._try_send(self._outgoing[0]):
            self._outgoing.popleft()
        if not self._outgoing:
            self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self, turns: int = _TURN) -> bool:
        """Take packets; returns whether there may be more."""
        for _ in range(turns):
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return False
            except ConnectionError:
                size = 0
            if size == 0:
                self._loop.remove_reader(self._socket.fileno())
                return False
            self._on_packet(self, spawn.decode_to_agent(self._buffer[:size]))
        return True

    def _on_gone(self) -> None:
        while self._on_readable():
            pass
        self.gone = True
        self._process.wait()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._loop.remove_reader(self._pidfd)
        self._socket.close()
        os.close(self._pidfd)
        self._stderr = Path(self._err_path).read_text(errors="replace").splitlines()
        os.unlink(self._err_path)
        self._on_end(self)


def make_directories(run_dir: Path) -> str:
    """Make what templates and workers need in *run_dir*; returns the import path of our package there."""
    for name in ("w", "t", "pkg"):
        (run_dir / name).mkdir(mode=0o700, exist_ok=True)
    package = run_dir / "pkg" / "rlinf_actors"
    package.unlink(missing_ok=True)  # of an earlier agentd here, which may have been installed elsewhere
    package.symlink_to(Path(rlinf_actors.__file__).resolve().parent)
    return str(package.parent)


def _widen(sock: socket.socket) -> None:
    """Room for the largest packet: the default buffer holds 200 KiB."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, spawn.MAX_PACKET)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, spawn.MAX_PACKET)
