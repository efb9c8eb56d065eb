"""A template process as agentd sees it: its start, its socket, its end.

The templates of one agentd: one for each kind of worker, started when first needed, a few kept idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from agentd import keeper, launch_plan
from agentd.keeper_client import KeeperClient, Started
from agentd.launch_plan import Key, Site
from agentd.run_dir import boot_id, make_directories, remove_files, write_file
from rlinf_actors import procfs
from rlinf_actors.exhaustion import explain
from rlinf_actors.installed import fingerprint
from rlinf_actors.net import fault_injection
from rlinf_actors.net.unix_sockets import PacketQueue
from rlinf_actors.version import VERSION
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.protocol import PROTOCOL

_SO_SNDBUFFORCE = 32
_OVERHEAD = 32
"""So many bytes less than the send buffer (SO_SNDBUF) has a packet at most: unix_dgram_sendmsg in the kernel."""
_TURN = 64
"""Packets taken before the loop gets a turn."""
_STDERR_LINES = 20
_EXIT_S = 1.0
"""How long a template may live on without its socket, in seconds: a process that ends closes it moments earlier."""


class Record(msgspec.Struct, frozen=True):
    """What another agentd finds of a template, in ``t/*.json``: which process it is, and what it serves.

    With `boot` (the kernel's boot id) and `started` (clock ticks since then) `pid` names a process for good. `protocol`
    is that of its agentd; one of another protocol cannot be taken over. `settings` hashes what its agentd told it.
    """

    pid: int
    started: int
    boot: str
    protocol: int
    key: Key
    settings: str = ""


@dataclass
class Process:
    """A template process, with the socket to it.

    Attributes:
        pid: its process id.
        pidfd: of it.
        socket: SOCK_SEQPACKET.
        stem: of its files in the run directory.
        starting: what `pid` and `pidfd` come from, if the keeper has not started it yet.
    """

    pid: int
    pidfd: int
    socket: socket.socket
    stem: str
    starting: asyncio.Future[Started] | None = None


def start(
    keeping: KeeperClient,
    key: Key,
    command: list[str],
    env: dict[str, str],
    owner: int,
    stem: str,
) -> Process:
    """Ask the keeper to start a template. Does not wait for that.

    Args:
        keeping: the connection to the keeper.
        key: what the template serves.
        command: its argv; its socket to us is the descriptor keeper.CONTROL.
        env: its environment.
        owner: pidfd that it inherits as keeper.OWNER, -1 without.
        stem: of its files in the run directory; what it writes itself goes into one.

    Raises:
        OSError: the keeper cannot be asked, or a file cannot be written.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        stack.callback(ours.close)
        stack.callback(remove_files, stem)
        with theirs, open(f"{stem}.err", "wb") as err:
            if fault_injection.active is not None:
                fault_injection.active.start("spawn.template", key.interpreter)
            fds = [theirs.fileno(), err.fileno(), *([owner] * (owner >= 0))]
            process = Process(0, -1, ours, stem, keeping.start(command, env, fds))
        stack.pop_all()
    return process


def reaped(pid: int) -> int | None:
    """Reap a process that has ended, if it is a child of this one: its keeper has ended before it.

    Returns:
        Its wait status, None if it is another one's child.
    """
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if ended else None


class Template:
    """One template process. Loop thread only.

    Args:
        loop: watches its socket and its end.
        keeping: says how it ended.
        key: what it serves.
        process: it; this object owns its socket and pidfd from now on.
        on_packet: called with each packet.
        on_end: called once, after the last packet, when the process is gone and how it ended is known, if it ever is.

    Attributes:
        ready: it said TemplateReady.
        kept: another agentd may take it over, and finds its record.
        failure: what is wrong with its interpreter, "" while nothing is known to be.
        settings: hash of what its agentd told it.
        installed: fingerprint of what it found in `paths` before it imported that; "" if it has not said.
        paths: its sys.path.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        keeping: KeeperClient,
        key: Key,
        process: Process,
        on_packet: Callable[[Template, template_protocol.ToAgent], None],
        on_end: Callable[[Template], None],
    ) -> None:
        self.key = key
        self.ready = False
        self.kept = False
        self.failure = ""
        self.settings = ""
        self.installed = ""
        self.paths: tuple[str, ...] = ()
        self.gone = False
        self._loop = loop
        self._keeping = keeping
        self._abandoned = False
        self._code: int | None = None
        self._process = process
        self._on_packet = on_packet
        self._on_end = on_end
        self._buffer = memoryview(bytearray(template_protocol.MAX_PACKET))
        self._stderr: list[str] = []
        self._exit_timer: asyncio.TimerHandle | None = None
        self._socket, self._pidfd = process.socket, process.pidfd
        self._socket.setblocking(False)
        self._outgoing = PacketQueue(self._socket)
        widen(self._socket)
        room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _OVERHEAD
        self._largest = min(
            room, template_protocol.MAX_PACKET
        )  # the other end takes no more at once, and the rest would be lost
        if process.starting is None:
            self._watch()
        else:
            process.starting.add_done_callback(self._on_started)

    @property
    def pid(self) -> int:
        """Its process id, 0 before the keeper has started it."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether its process has ended, also where the loop has not heard of that yet."""
        return self.gone or (self._pidfd >= 0 and procfs.has_ended(self._pidfd))

    def send(self, packet: template_protocol.ToTemplate) -> None:
        """Send, or queue until there is room.

        Raises:
            OSError: the packet is larger than the kernel, or the other end, lets a packet be.
        """
        data = template_protocol.encode(packet)
        if self.gone:
            return
        if len(data) > self._largest:  # now, and not when those before it have left: nobody would hear of it then
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if not self._outgoing.send(data):
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def kill(self) -> None:
        """End the process at once; its workers get SIGKILL from the kernel."""
        if self.gone:
            return
        if self._pidfd < 0:
            self._not_started("")
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def abandon(self) -> None:
        """Let go of the process: another agentd takes it over. One that is not ready ends with us."""
        self._abandoned = True
        if not self.gone:
            self.gone = True
            self._close()

    def last_words(self) -> str:
        """How it ended and the last lines that it wrote."""
        if not self.pid:
            return "the keeper had not started it yet"
        code = self._code
        how = "how is not known: its keeper had ended"
        if code is not None:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        lines = self._stderr[-_STDERR_LINES:]
        return f"{how}; it wrote:\n" + "\n".join(lines) if lines else how

    def _on_started(self, starting: asyncio.Future[Started]) -> None:
        """The keeper has answered, or will not."""
        if starting.cancelled():
            return
        error = starting.exception()
        if error is not None:
            assert isinstance(error, OSError)
            if not self.gone:
                self._not_started(f"its template cannot be started: {self.key.interpreter}: {explain(error)}")
            return
        started = starting.result()
        if self.gone:  # since the keeper answered
            signal.pidfd_send_signal(started.pidfd, signal.SIGKILL)
            os.close(started.pidfd)
            return
        self._process.pid, self._pidfd = started.pid, started.pidfd
        self._watch()
        if self.kept:
            record = Record(started.pid, started.began, boot_id(), PROTOCOL, self.key, self.settings)
            try:
                write_file(Path(f"{self._process.stem}.json"), msgspec.json.encode(record))
            except OSError as why:
                self.failure = f"its template's record {self._process.stem}.json cannot be written: {explain(why)}"
                self.kill()

    def _not_started(self, failure: str) -> None:
        self.failure = failure
        self.gone = True
        self._close()
        self._loop.call_soon(self._finish, {})

    def _watch(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._loop.add_reader(self._pidfd, self._on_gone)

    def _on_writable(self) -> None:
        if self._outgoing.flush():
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
                if self._exit_timer is None:  # it ends, or has let go of us, and then does nothing for us any more
                    self._exit_timer = self._loop.call_later(_EXIT_S, self.kill)
                return False
            self._on_packet(self, template_protocol.decode_to_agent(self._buffer[:size]))
        return True

    def _on_gone(self) -> None:
        while self._on_readable():
            pass
        self.gone = True
        self._close()
        status = reaped(self.pid)
        if status is not None:
            self._finish({self.pid: status})
        else:
            self._keeping.when_ended([self.pid], self._finish)

    def _finish(self, statuses: dict[int, int]) -> None:
        if self._abandoned:
            return
        if self.pid in statuses:
            self._code = os.waitstatus_to_exitcode(statuses[self.pid])
        with contextlib.suppress(FileNotFoundError):
            self._stderr = Path(f"{self._process.stem}.err").read_text(errors="replace").splitlines()
        remove_files(self._process.stem)
        self._on_end(self)

    def _close(self) -> None:
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        elif self._process.starting is not None:
            self._process.starting.cancel()


def widen(sock: socket.socket) -> None:
    """Room for the largest packet: the default buffer holds 200 KiB."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, template_protocol.MAX_PACKET)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, template_protocol.MAX_PACKET)


log = logging.getLogger(__name__)

MAX_IDLE = 4
"""Templates without workers that are kept for later launches; the one used last stays longest."""


class TemplatePool:
    """All templates of this agent. Loop thread only.

    Args:
        loop: the agent's.
        site: where their workers run.
        keeping: the connection to the keeper, which starts them.
        owner: pidfd of the process whose end is the end of every template, -1 without.
        on_packet, on_end: of each template.

    Attributes:
        running: those whose process is not gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        keeping: KeeperClient,
        owner: int,
        on_packet: Callable[[Template, template_protocol.ToAgent], None],
        on_end: Callable[[Template], None],
    ) -> None:
        self.running: set[Template] = set()
        self._loop = loop
        self._site = site
        self._keeping = keeping
        self._owner = owner
        self._keep_s = site.keep_s
        self._on_packet = on_packet
        self._on_end = on_end
        self._by_key: dict[launch_plan.Key, Template] = {}
        self._told_to_end: set[Template] = set()
        self._numbers = count(1)
        self._pkg = make_directories(site.run_dir)
        told = msgspec.json.encode((VERSION, site.entry, self._told()))
        self._settings = hashlib.sha256(told).hexdigest()[:32]

    def get(self, key: launch_plan.Key, node_env: Mapping[str, str]) -> Template:
        """The template of this key; started if there is none.

        Raises:
            OSError: the keeper cannot be asked. Where a template cannot be started, it ends.
        """
        template = self._by_key.pop(key, None)
        if template is None or template.has_ended():
            stem = self._stem()
            owner = keeper.OWNER if self._owner >= 0 else -1
            config = {"owner": owner, "entry": self._site.entry, "slot": launch_plan.SLOT}
            if self._keep_s is not None:
                config |= {"keep": f"{stem}.sock", "keep_s": self._keep_s}
            json = msgspec.json.encode({**config, **self._told(), "preload": key.preload}).decode()
            process = start(
                self._keeping,
                key,
                launch_plan.template_command(key, self._pkg, keeper.CONTROL, self._site.node, json),
                launch_plan.template_environment(key, node_env),
                self._owner,
                stem,
            )
            template = self._made(key, process)
            template.settings, template.kept = self._settings, self._keep_s is not None
        self._by_key[key] = template  # at the end: it was used last
        return template

    def _told(self) -> dict[str, object]:
        """What each template is told of this node's settings."""
        rules = self._site.rules
        return {"cgroups": rules.cgroups, "log_bytes": rules.log_bytes}

    def adopt(self, record: Record, process: Process, inventory: template_protocol.Inventory) -> Template:
        """Take over a template of an earlier agentd."""
        template = self._made(record.key, process)
        template.ready = True
        template.settings, template.installed = record.settings, inventory.installed
        template.paths = tuple(inventory.paths)
        self._by_key.setdefault(record.key, template)
        return template

    def refresh(self) -> None:
        """Retire each template that was told other settings, or imported other code, than the next one would.

        Its workers go on. It ends when it has none (`trim`).
        """
        now: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
        for template in [one for one in self._by_key.values() if one.ready]:
            imports = template.paths, template.key.preload
            if imports not in now:
                now[imports] = fingerprint(*imports)
            if (template.settings, template.installed) != (self._settings, now[imports]):
                what = "code" if template.settings == self._settings else "settings"
                log.info("template %d forks no more workers: its %s are not those of now", template.pid, what)
                self.retire(template)

    def registered(self, seconds: float) -> None:
        """The head has taken this node; templates wait that long for another agentd, where they do."""
        if self._keep_s is None:
            return
        self._keep_s = seconds
        for template in self.running:
            template.send(template_protocol.KeepFor(seconds))

    def retire(self, template: Template) -> None:
        """The next launch of its kind gets another one."""
        if self._by_key.get(template.key) is template:
            del self._by_key[template.key]

    def trim(self, busy: Collection[Template]) -> None:
        """End the retired templates that are idle, and of the others those idle longest, beyond MAX_IDLE of them."""
        idle = [key for key, template in self._by_key.items() if template.ready and template not in busy]
        for key in idle[:-MAX_IDLE]:
            self.retire(self._by_key[key])
        serving = set(self._by_key.values())
        for template in self.running - serving - set(busy) - self._told_to_end:
            if template.ready:
                self._told_to_end.add(template)
                template.send(template_protocol.Shutdown())

    def shut_down(self) -> None:
        """Tell all to end."""
        for template in self.running:
            if template.ready:
                template.send(template_protocol.Shutdown())
            else:
                template.kill()  # it may be in a long import, and has no workers yet

    def _made(self, key: launch_plan.Key, process: Process) -> Template:
        template = Template(self._loop, self._keeping, key, process, self._on_packet, self._ended)
        self.running.add(template)
        return template

    def _stem(self) -> str:
        """Of files that no other template has, or will have while one without a record runs on.

        Raises:
            OSError: when this process began cannot be read.
        """
        this = procfs.stat_of(os.getpid())
        while True:
            stem = f"{self._site.run_dir}/t/{this.pid}-{this.started}-{next(self._numbers)}"
            if not os.path.exists(f"{stem}.err"):
                return stem

    def _ended(self, template: Template) -> None:
        self.running.discard(template)
        self._told_to_end.discard(template)
        self.retire(template)
        self._on_end(template)
