"""The template processes of one agentd: one for each TemplateKey, started when first needed; a few are kept idle.

`TemplateProcess` starts one template, exchanges packets with it, and notices its end. `TemplatePool` holds all
templates, returns the template for a worker, and ends templates without workers. agentd.workers calls both on the
loop's thread; nothing here may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from agentd.keeper_client import KeeperClient, Started
from agentd.launch_plan import TemplateKey
from agentd.run_dir import boot_id, remove_template_files, write_file
from agentd.template_start import OrderedTemplate, TemplateStarter
from agentd.users import User, as_user
from rlinf_actors import procfs
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.exhaustion import explain
from rlinf_actors.installed import Looks, fingerprint
from rlinf_actors.net.daemon import SLICE_S
from rlinf_actors.net.unix_sockets import PacketQueue
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.protocol import PROTOCOL

log = logging.getLogger(__name__)

MAX_IDLE = 4
"""Number of templates without workers that are kept for later launches. The longest unused template ends first."""
_SO_SNDBUFFORCE = 32
_OVERHEAD = 32  # bytes of SO_SNDBUF that a packet cannot use (unix_dgram_sendmsg in the kernel)
_TURN = 64  # packets received in one callback before the event loop runs other callbacks
_LAST, _LAST_S = 1000, 1.0
"""Packets of an ended template that are still read, and seconds: the kernel holds about 300 of them."""
_MOST_QUEUED = 200_000  # packets that wait for a template: twice the workers that a group may have
_STDERR_LINES = 20
_STDERR_BYTES = 16 << 10  # read from the end of a template's stderr, which may be as large as the disk
_CONTINUE, _KILL = 0.2, 0.125
"""Fractions at the end of a robot lease in which a template is continued, and killed, that has confirmed no renewal."""
_OWN_STALL_S, _MORE_S = 0.1, 0.15
"""If agentd itself was late by more than the first, the template gets the second, in seconds, to confirm."""
_EXIT_S = 1.0  # seconds from the end of a template's socket until SIGKILL, if the process has not ended by then


class TemplateRecord(msgspec.Struct, frozen=True):
    """The description of a running template in a file of the run directory. The next agentd reads it to find the
    template and take it over.
    """

    pid: int
    started: int  # in clock ticks since boot; with pid and boot it identifies the process
    boot: str  # the kernel's boot id
    protocol: int  # version between agentd and template; an agentd that does not speak it cannot take over
    key: TemplateKey
    settings: str = ""  # hash of the settings that its agentd gave the template
    listens: str = ""  # path of the socket at which it is adopted; "" for the one beside this file
    uid: int | None = None  # of its process; None for agentd's own


class SurvivingTemplate(msgspec.Struct):
    """A running template of an earlier agentd, with its workers. This agentd has connected to it, and
    `TemplatePool.adopt` takes it over.
    """

    record: TemplateRecord
    pidfd: int
    socket: socket.socket
    stem: str  # path of the template's files without suffix
    workers: list[template_protocol.SurvivingWorker]  # running, or ended with exit reports that the head may not have
    inventory: template_protocol.Inventory
    user: User | None = None  # as whom it runs; None for agentd's own user
    # workers in no order on disk; take_inventory kills them
    strays: list[template_protocol.SurvivingWorker] = msgspec.field(default_factory=list)


Process = tuple[int, int] | asyncio.Future[Started]
"""A template's pid and pidfd, or a future of them while the keeper starts the process."""


class TemplateProcess:
    """One template process: exchanges packets with the template, and notices its end. This object owns the socket and
    the pidfd. Loop thread only.

    Args:
        keeper: reports the exit status of the process.
        sock: SOCK_SEQPACKET socket, connected to the template.
        stem: path of the template's files in the run directory, without suffix.
        on_packet: called with each packet from the template.
        on_end: called once, after the last packet and the end of the process. Before that the keeper has reported the
            exit status, if it can.

    Attributes:
        pid: 0 before the keeper has started the process.
        ready: True after the packet TemplateReady.
        kept: True if the next agentd can take over the template by its record on disk.
        failure: why the template cannot be used; "" if no error is known.
        settings: hash of the settings that its agentd gave the template.
        listens: path of the socket at which a later agentd adopts the template.
        user: as whom the template runs; None for agentd's own user.
        paths: sys.path of the template.
        installed: fingerprint of the code in `paths` before the template imported it; "" if unknown.
        gone: True once the process has ended, could not be started, or was left to the next agentd.
        waiting: ids of the workers that are to be forked, in order.
        forking: ids of the workers that the template was asked to fork, until it says that it has done so.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        keeper: KeeperClient,
        key: TemplateKey,
        sock: socket.socket,
        stem: str,
        process: Process,
        on_packet: Callable[[TemplateProcess, template_protocol.ToAgent], None],
        on_end: Callable[[TemplateProcess], None],
    ) -> None:
        self.key = key
        self.pid, self._pidfd = process if isinstance(process, tuple) else (0, -1)
        self.ready = False
        self.kept = False
        self.failure = ""
        self.settings = self.listens = ""
        self.user: User | None = None
        self.installed = ""
        self.paths: tuple[str, ...] = ()
        self.gone = False
        self.waiting = deque[str]()
        self.forking = set[str]()
        self._loop = loop
        self._keeper = keeper
        self._socket = sock
        self._stem = stem
        self._starting = None if isinstance(process, tuple) else process
        self._on_packet = on_packet
        self._on_end = on_end
        self._abandoned = self._distrusted = False
        self._code: int | None = None
        self._stderr: list[str] = []
        self._confirmed = self._sent = 0.0  # ends of robot leases
        self._silence: asyncio.TimerHandle | None = None
        self._outgoing = PacketQueue(sock)
        self._buffer = memoryview(bytearray(template_protocol.MAX_PACKET))
        self._exit_timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        widen(sock)
        room = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _OVERHEAD
        self._largest = min(room, template_protocol.MAX_PACKET)  # the template reads no more, and would lose the rest
        if self._starting is None:
            self._watch()
        else:
            self._starting.add_done_callback(self._on_started)

    def has_ended(self) -> bool:
        """Return True if the template's process has ended, even if the event loop has not noticed the end yet."""
        return self.gone or (self._pidfd >= 0 and procfs.has_ended(self._pidfd))

    def send(self, packet: template_protocol.ToTemplate) -> None:
        """Send a packet to the template, or queue it until the socket has room. If the template has ended, drop the
        packet.

        Raise OSError if the packet is too large for the socket or the template.
        """
        data = template_protocol.encode(packet)
        if self.gone:
            return
        if len(data) > self._largest:  # refused now: once it is queued, no caller could be told
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if len(self._outgoing) > _MOST_QUEUED:
            self.distrust("it does not read its packets")
        elif not self._outgoing.send(data):
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def renew(self, until: float, lease_s: float) -> None:
        """Send Renew. If the template confirms no renewal while the lease lasts, continue it, and then kill it: at once
        if it stands still, a lease later if it only does not answer, since watchdogs need no template to end workers.
        """
        self.send(template_protocol.Renew(until))
        if self._silence is None and not self.gone:
            since = self._confirmed if self._confirmed > until - lease_s / 2 else until  # of an earlier robot worker
            self._expect(since, lease_s, since - _CONTINUE * lease_s, False)
        self._sent = until

    def renewed(self, until: float) -> None:
        """Handle the template's packet Renewed."""
        self._confirmed = until
        if until >= self._sent:
            self._forget_silence()

    def _expect(self, since: float, lease_s: float, due: float, continued: bool) -> None:
        self._silence = self._loop.call_at(due, self._judge, since, lease_s, due, continued)

    def _judge(self, since: float, lease_s: float, due: float, continued: bool) -> None:
        """Continue or kill the template if it has confirmed no renewal *since* that one."""
        self._on_readable()  # what it sent before
        now = self._loop.time()
        if self._silence is None or self.gone:
            return
        found = procfs.stat(self.pid)
        still = found is not None and found.stopped  # else it may only be slow, on a machine with much to do
        if self._confirmed > since:
            self._expect(self._confirmed, lease_s, self._confirmed - _CONTINUE * lease_s, False)
        elif continued and now <= due + _OWN_STALL_S and (still or now >= since + lease_s):
            silent_s = now - (since - lease_s)
            self.distrust(f"it has confirmed no renewal of its robots' leases for {silent_s:.1f} s")
        else:  # a renewal that it got and did not confirm must not let its workers go on
            self.send(template_protocol.Revoke("", "its template stood still"))
            self._signal(signal.SIGCONT)
            self._expect(since, lease_s, max(since - _KILL * lease_s, now + _MORE_S), True)

    def _forget_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def kill(self) -> None:
        """Send SIGKILL to the template; the kernel then kills its workers. A template that is not started yet never
        starts.
        """
        if self.gone:
            return
        if self._pidfd < 0:
            self._not_started("")
            return
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def distrust(self, why: str) -> None:
        """Kill the template, and with it its workers, because it has sent what no template sends, or does not react.

        *why* says what. The code of a worker can act as its template, whose memory is open to its user.
        """
        if not self.gone and not self._distrusted:
            log.error("template %d is killed, and its workers: %s", self.pid, why)
            self._distrusted = True
            self.failure = f"its template was killed: {why}"
            self._loop.remove_reader(self._socket.fileno())
            self.kill()

    def abandon(self) -> None:
        """Close the connection to the template. If the template is ready, it waits for the next agentd; otherwise it
        ends.
        """
        self._abandoned = True
        if not self.gone:
            self.gone = True
            self._close()

    def last_words(self) -> str:
        """Return how the template ended and the last lines that it wrote to stderr, as text for people."""
        if not self.pid:
            return "the keeper had not started it yet"
        code = self._code
        how = "how is not known: its keeper had ended"
        if code is not None:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        lines = self._stderr[-_STDERR_LINES:]
        return f"{how}; it wrote:\n" + "\n".join(lines) if lines else how

    # --- start ---

    def _on_started(self, starting: asyncio.Future[Started]) -> None:
        if starting.cancelled():
            return
        error = starting.exception()
        if error is not None:
            assert isinstance(error, OSError)
            if not self.gone:
                self._not_started(f"its template cannot be started: {self.key.interpreter}: {explain(error)}")
            return
        started = starting.result()
        if self.gone:  # killed since the keeper answered
            signal.pidfd_send_signal(started.pidfd, signal.SIGKILL)
            os.close(started.pidfd)
            return
        self.pid, self._pidfd = started.pid, started.pidfd
        self._watch()
        if self.kept:
            uid = self.user.uid if self.user is not None else None
            settings, listens = self.settings, self.listens
            record = TemplateRecord(started.pid, started.began, boot_id(), PROTOCOL, self.key, settings, listens, uid)
            try:
                write_file(Path(f"{self._stem}.json"), msgspec.json.encode(record))
            except OSError as why:
                self.failure = f"its template's record {self._stem}.json cannot be written: {explain(why)}"
                self.kill()

    def _not_started(self, failure: str) -> None:
        self.failure = failure
        self.gone = True
        self._close()
        self._loop.call_soon(self._finish, {})

    # --- the socket ---

    def _watch(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._loop.add_reader(self._pidfd, self._on_process_end)

    def _on_writable(self) -> None:
        if self._outgoing.flush():
            self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self, most: int = _TURN, seconds: float = SLICE_S) -> None:
        """Receive packets from the template, *most* at most and for about so many *seconds*, and pass them to
        `on_packet`.
        """
        until = time.perf_counter() + seconds
        for _ in range(most if not self._distrusted else 0):
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionError:
                size = 0
            if size == 0:
                self._loop.remove_reader(self._socket.fileno())
                if self._exit_timer is None:  # without its socket it is of no use, even if it lives
                    self._exit_timer = self._loop.call_later(_EXIT_S, self.kill)
                return
            try:
                packet = template_protocol.decode_to_agent(self._buffer[:size])
            except RemoteWireError as error:
                self.distrust(str(error))
                return
            self._on_packet(self, packet)
            if self._distrusted or time.perf_counter() > until:
                return

    # --- end ---

    def _on_process_end(self) -> None:
        self._on_readable(_LAST, _LAST_S)  # not to the end: a process that holds the template's socket may send on
        self.gone = True
        self._close()
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)  # ours, if its keeper ended first
        except ChildProcessError:
            pid, status = 0, 0
        if pid:
            self._finish({pid: status})
        else:
            self._keeper.when_ended([self.pid], self._finish)

    def _finish(self, statuses: dict[int, int]) -> None:
        if self._abandoned:
            return
        if self.pid in statuses:
            self._code = os.waitstatus_to_exitcode(statuses[self.pid])
        with contextlib.suppress(FileNotFoundError):
            self._stderr = _end_of(f"{self._stem}.err").decode(errors="replace").splitlines()
        remove_template_files(self._stem)
        if self.user is not None:
            with contextlib.suppress(OSError), as_user(self.user):
                os.unlink(self.listens)
        self._on_end(self)

    def _close(self) -> None:
        self._forget_silence()
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        elif self._starting is not None:
            self._starting.cancel()


def _end_of(path: str) -> bytes:
    """Return the last bytes of a file, at most _STDERR_BYTES. Raise OSError if it cannot be read."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _STDERR_BYTES))
        return file.read(_STDERR_BYTES)


def widen(sock: socket.socket) -> None:
    """Enlarge the send buffer of *sock* so that the largest packet to a template fits."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, template_protocol.MAX_PACKET)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, template_protocol.MAX_PACKET)


class TemplatePool:
    """All templates of this agentd: starts them, and ends those that are idle. Loop thread only. `running` has the
    templates whose process has not ended.

    Args:
        starter: orders the template processes from the keeper.
        on_packet: called with a template and each packet from it.
        on_end: called with a template once, after its process has ended.
        ordered: a template that *starter* has ordered already; None if there is none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        starter: TemplateStarter,
        on_packet: Callable[[TemplateProcess, template_protocol.ToAgent], None],
        on_end: Callable[[TemplateProcess], None],
        ordered: OrderedTemplate | None = None,
    ) -> None:
        self.running: set[TemplateProcess] = set()
        self._loop = loop
        self._starter = starter
        self._keeper = starter.keeper
        self._on_packet = on_packet
        self._on_end = on_end
        self._by_key: dict[TemplateKey, TemplateProcess] = {}  # those that serve launches; the last used is at the end
        self._told_to_end: set[TemplateProcess] = set()
        if ordered is not None:
            self._by_key[ordered.key] = self._start(ordered)

    def get(self, key: TemplateKey, node_env: Mapping[str, str]) -> TemplateProcess:
        """Return the template for *key*. If none runs, start one in the environment *node_env*.

        Raise OSError if the keeper cannot be reached. If the start fails later, `on_end` is called for the returned
        template.
        """
        template = self._by_key.pop(key, None)
        if template is None or template.has_ended():
            template = self._start(self._starter.order(key, node_env))
        self._by_key[key] = template
        return template

    def _start(self, ordered: OrderedTemplate) -> TemplateProcess:
        template = self._add(ordered.key, ordered.socket, ordered.stem, ordered.starting, ordered.settings)
        template.kept = self._starter.keep_s is not None
        template.listens, template.user = ordered.listens, ordered.user
        return template

    def adopt(self, found: SurvivingTemplate) -> TemplateProcess:
        """Add a running template of an earlier agentd to the pool, and return its TemplateProcess."""
        record = found.record
        template = self._add(record.key, found.socket, found.stem, (record.pid, found.pidfd), record.settings)
        template.ready = True
        template.listens, template.user = record.listens, found.user
        template.installed, template.paths = found.inventory.installed, tuple(found.inventory.paths)
        self._by_key.setdefault(record.key, template)
        return template

    def refresh(self, user: str) -> None:
        """Retire each template of *user* since whose start agentd's settings, or the code that it imported, have
        changed. "" stands for agentd's own user.
        """
        now: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
        looks = Looks()  # for all of them: they may be many, and say where their code is
        for template in [one for key, one in self._by_key.items() if one.ready and key.user == user]:
            imports = template.paths, template.key.preload
            if imports not in now:
                with as_user(template.user):
                    now[imports] = fingerprint(*imports, looks)
            if (template.settings, template.installed) != (self._starter.settings, now[imports]):
                what = "its code has" if template.settings == self._starter.settings else "settings have"
                log.info("template %d forks no more workers, because %s changed since it started", template.pid, what)
                self.retire(template)

    def registered(self, seconds: float, packet: template_protocol.NodeRegistered) -> None:
        """Send *packet* to all templates, for their workers. Unless templates are not kept, tell them also for how many
        *seconds* they wait for the next agentd after the end of this one.
        """
        if self._starter.keep_s is not None:
            self._starter.keep_s = seconds
        for template in self.running:
            if self._starter.keep_s is not None:
                template.send(template_protocol.KeepFor(seconds))
            template.send(packet)

    def retire(self, template: TemplateProcess) -> None:
        """Let *template* fork no more workers. `trim` ends it when it has no workers left."""
        if self._by_key.get(template.key) is template:
            del self._by_key[template.key]

    def trim(self, busy: Collection[TemplateProcess]) -> None:
        """End the idle templates that are retired. Of the other idle templates, keep the MAX_IDLE that were used last
        and end the rest.

        *busy* has the templates with workers, or with exit reports that the head may not have. All other templates are
        idle.
        """
        idle = [key for key, template in self._by_key.items() if template.ready and template not in busy]
        for key in idle[:-MAX_IDLE]:
            self.retire(self._by_key[key])
        serving = set(self._by_key.values())
        for template in self.running - serving - set(busy) - self._told_to_end:
            if template.ready:
                self._told_to_end.add(template)
                template.send(template_protocol.Shutdown())

    def shut_down(self) -> None:
        for template in self.running:
            if template.ready:
                template.send(template_protocol.Shutdown())
            else:
                template.kill()  # it may be in a long import, and has no workers yet

    def _add(
        self, key: TemplateKey, sock: socket.socket, stem: str, process: Process, settings: str
    ) -> TemplateProcess:
        on_packet, on_end = self._on_packet, self._on_template_end
        template = TemplateProcess(self._loop, self._keeper, key, sock, stem, process, on_packet, on_end)
        template.settings = settings
        self.running.add(template)
        return template

    def _on_template_end(self, template: TemplateProcess) -> None:
        self.running.discard(template)
        self._told_to_end.discard(template)
        self.retire(template)
        self._on_end(template)
