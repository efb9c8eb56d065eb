"""Take over or end the processes that an earlier agentd left in this run directory.

`take_inventory` runs before agentd registers, on its loop, and takes a few seconds at most. This agentd holds the lock
of the run directory, so no other agentd acts there. A template is taken over if it is the process that its record
names and answers in time; otherwise it is ended with its workers. Processes of workers without a
template are ended too. Afterwards this agentd knows every process that is left.

`reap` (`agentd --reap`, ExecStopPost= of the unit) ends everything. systemd runs it whenever the service has ended.
After a crash systemd starts agentd again, so the workers must go on: `spared` decides that by the unit's result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from agentd import keeper_client
from agentd.config_fields import Config
from agentd.launch_plan import find_roots
from agentd.run_dir import OrderLedger, RunDir, boot_id, default_run_dir, make_directories, was_stopping
from agentd.sweep import Sweep, clear_cgroups
from agentd.templates import SurvivingTemplate, TemplateRecord, widen
from agentd.users import User, Users, as_user, remove_run_dirs
from rlinf_actors import procfs
from rlinf_actors.compat import timeout
from rlinf_actors.errors import ConfigError, ProtocolMismatchError, RemoteWireError
from rlinf_actors.net.unix_sockets import peer_of, user_name
from rlinf_actors.plurals import counted
from rlinf_actors.version import VERSION
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.template_protocol import SurvivingWorker
from rlinf_actors.wire.values import RunningWorker

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # seconds that a template may take to list its workers. A template stopped by SIGSTOP never does
MAX_WORKERS = 10_000  # of one template: the code of a user may act for a template, and send any number
_TURN = 256  # packets received before the event loop runs other callbacks
_SILENT = f"it did not answer within {ANSWER_S:g} s"
TEMPLATE_END_S = template_protocol.ROBOT_GONE_S + 1.0
"""Seconds that a template may take to end after SIGTERM; its robot workers get ROBOT_GONE_S of them."""
KILLED_S = 1.0  # seconds to wait for the end of a killed process, which may hang in an uninterruptible system call


class Survivors(msgspec.Struct):
    """The result of `take_inventory`: the templates and workers of earlier agentds that run on, and the workers that
    were ended instead.
    """

    ledger: OrderLedger  # the head's orders to earlier agentds, on disk
    templates: list[SurvivingTemplate] = msgspec.field(default_factory=list)
    workers: dict[str, RunningWorker] = msgspec.field(default_factory=dict)  # of these templates, by id
    lost: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # for each worker that was ended instead, its id and the reason
    since: float = 0.0  # when this node's last registered agentd ended (CLOCK_MONOTONIC, seconds); 0 if unknown
    # for each worker of ended templates ("" if unknown), its processes: pid and start in clock ticks since boot; listed
    # before the template ends, since a process with an empty environment cannot be found later
    processes: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    known: dict[str, RunningWorker] = msgspec.field(default_factory=dict)  # workers in the head's orders, by id
    users: Users | None = None  # as whom workers run; None if all are agentd's own

    def processes_of(self, ids: Iterable[str]) -> dict[int, int]:
        return {pid: started for id in ids for pid, started in self.processes.get(id, {}).items()}

    def may_be_of(self, id: str, user: str) -> bool:
        """Return False if the worker *id* was started as another user than *user*, whatever a template of that user
        says, or the environment of a process. "" stands for agentd's own user.
        """
        if id not in self.known or self.users is None:
            return True
        try:
            own = self.users.of_driver(self.ledger.drivers.get(id, ""))
        except ValueError:  # its driver has no user any more
            return False
        return user == (own.name if own is not None else "")


class _UnfitError(Exception):
    """Raised if a template cannot be taken over for the reason *why*. *can_ask* is True if the template may still react
    to SIGTERM.
    """

    def __init__(self, why: str, can_ask: bool = True) -> None:
        super().__init__(why)
        self.can_ask = can_ask


async def take_inventory(run_dir: str, keep: bool, users: Users | None = None) -> Survivors:
    """Find the templates and workers that an earlier agentd left in *run_dir*, so that this agentd can take them over.

    Templates that cannot be taken over are ended with their workers. If *keep* is false, every template is ended. The
    caller holds the lock of the run directory. *users* has the users of templates, None if all are agentd's own.

    Raises:
        OSError: the directory cannot be read or written.
    """
    make_directories(Path(run_dir))
    ledger = OrderLedger(Path(run_dir, "l"))
    known = ledger.read()
    survivors = Survivors(ledger, known=known, users=users)
    records = _records(run_dir)
    found = await asyncio.gather(*(_take_over(stem, one, keep, survivors) for stem, one in records.items()))
    survivors.templates = [template for template in found if template is not None]
    unknown = set(survivors.processes)
    for template in survivors.templates:
        template.strays = [worker for worker in template.workers if worker.id not in known]
        template.workers = [worker for worker in template.workers if worker.id in known]
        unknown |= {worker.id for worker in template.strays}
        survivors.workers.update({worker.id: known[worker.id] for worker in template.workers})
    survivors.since = _since(survivors.templates)
    left = [known[id] for id in known.keys() - survivors.workers.keys()]
    for worker in left:
        survivors.lost.setdefault(worker.spec.id, "its agentd and the template that it came from had both ended")
    plain = {worker.spec.id for worker in left if not worker.spec.claims}
    others = (unknown | {worker.spec.id for worker in left}) - plain  # an unknown worker may have robots
    robots = sweep(others - {""}, survivors.processes_of(others), template_protocol.ROBOT_GONE_S)
    await asyncio.gather(sweep(plain, survivors.processes_of(plain)), robots)
    if not keep:
        ledger.close()
        survivors.ledger = OrderLedger(None)
    _remove_files_except(run_dir, {template.stem for template in survivors.templates})
    return survivors


def _since(templates: Iterable[SurvivingTemplate]) -> float:
    """Return when the last registered agentd ended, as the *templates* with workers say; 0 if unknown.

    A user's code may act as a template and name an early time, after which workers are ended. So the latest time of all
    users counts: no user ends the workers of others.
    """
    said: dict[str, float] = {}
    for one in templates:
        if one.workers:
            user = one.record.key.user
            said[user] = min(said.get(user, one.inventory.since), one.inventory.since)
    return max(said.values(), default=0.0) if 0.0 not in said.values() else 0.0


def refuse_other_protocols(run_dir: str) -> None:
    """Raise ProtocolMismatchError if a template in *run_dir* speaks another protocol: this agentd cannot take over its
    workers, and ends none unless a person says so.
    """
    for record in _records(run_dir).values():
        pidfd = _open(record) if record.protocol != PROTOCOL else -1
        if pidfd >= 0:
            os.close(pidfd)
            workers = counted(len(processes_below(record.pid).keys() - {""}), "worker")
            user = user_name(record.uid if record.uid is not None else os.getuid())
            raise ProtocolMismatchError(
                f"process {record.pid} of {user} is a template with {workers}, of an agentd of protocol "
                f"{record.protocol}; this one is rlinf-actors {VERSION} (protocol {PROTOCOL}) and cannot take them "
                "over. They go on until their lease is over: start an agentd of their version, or end them by "
                f"`agentd --reap --run-dir {run_dir}`"
            )


# --- templates ---


def _records(run_dir: str) -> dict[str, TemplateRecord]:
    """Return the records of the templates in *run_dir*. The key is the path of the template's files without suffix."""
    found = {}
    for path in sorted(Path(run_dir, "t").glob("*.json")):
        try:
            found[str(path.with_suffix(""))] = msgspec.json.decode(path.read_bytes(), type=TemplateRecord)
        except FileNotFoundError:
            continue  # the template has just ended, and removed its files
        except msgspec.DecodeError as error:
            log.error("%s is no record of a template (%s): that template ends by itself", path, error)
    return found


def _remove_files_except(run_dir: str, stems: set[str]) -> None:
    for path in Path(run_dir, "t").iterdir():
        if str(path.with_suffix("")) not in stems:
            path.unlink(missing_ok=True)


def _open(record: TemplateRecord) -> int:
    """Return a pidfd of the template process that *record* names, or -1 if that process has ended."""
    return procfs.open_pidfd(record.pid, record.started) if record.boot == boot_id() else -1


async def _take_over(stem: str, record: TemplateRecord, keep: bool, survivors: Survivors) -> SurvivingTemplate | None:
    """Connect to the template of *record*, and return it with its workers. If the template has ended already, return
    None. If it runs but cannot be taken over, or if *keep* is false, end it, add its workers to `survivors.lost`, and
    return None.
    """
    pidfd = _open(record)
    if pidfd < 0:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, pidfd)
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.setblocking(False)
        try:
            if not keep:
                raise _UnfitError("workers are not kept here")
            user = _user_of(record, survivors.users)
            with as_user(user):
                _connect(sock, record.listens or f"{stem}.sock")
            workers, inventory = await _ask(sock, record)
            for worker in workers:
                if not survivors.may_be_of(worker.id, record.key.user):
                    raise _UnfitError(f"it says that it has worker {worker.id}, which was started as another user")
        except _UnfitError as why:
            text = f"its template, process {record.pid} of an earlier agentd, could not be taken over: {why}"
            log.error("template %d is ended, and its workers: %s", record.pid, why)
            await end_template(record.pid, pidfd, text, why.can_ask, survivors, record.key.user)
            return None
        stack.pop_all()
    log.info("template %d of an earlier agentd goes on, with %d workers", record.pid, len(workers))
    return SurvivingTemplate(record, pidfd, sock, stem, workers, inventory, user)


def _user_of(record: TemplateRecord, users: Users | None) -> User | None:
    try:
        user = users.named(record.key.user) if users is not None else None
    except (ConfigError, OSError) as error:
        raise _UnfitError(f"its user {record.key.user!r} cannot be used: {error}") from None
    if (user.name if user is not None else "", user and user.uid) != (record.key.user, record.uid):
        raise _UnfitError(f"it runs as user {record.key.user!r}, and this agentd starts none as that user")
    return user


def _connect(sock: socket.socket, path: str) -> None:
    try:
        sock.connect(path)
    except BlockingIOError:
        raise _UnfitError(_SILENT, can_ask=False) from None
    except OSError as error:
        raise _UnfitError(f"it cannot be asked ({error})") from None


async def _ask(
    sock: socket.socket, record: TemplateRecord
) -> tuple[list[SurvivingWorker], template_protocol.Inventory]:
    """Ask a template, to which *sock* is connected, for its workers. Raise _UnfitError if that fails."""
    try:
        pid, uid = peer_of(sock)
        if (pid, uid) != (record.pid, os.getuid() if record.uid is None else record.uid):
            raise _UnfitError(f"process {pid} of user {uid} listens in its place")
        widen(sock)
        sock.send(template_protocol.encode(template_protocol.Adopt()))
        return await _receive_inventory(sock)
    except (BlockingIOError, asyncio.TimeoutError):
        raise _UnfitError(_SILENT, can_ask=False) from None
    except (OSError, RemoteWireError) as error:
        raise _UnfitError(f"it cannot be asked ({error})") from None


async def _receive_inventory(sock: socket.socket) -> tuple[list[SurvivingWorker], template_protocol.Inventory]:
    """Receive a template's answer: its workers, and the Inventory packet that ends the answer.

    Raises:
        OSError: the template has ended.
        RemoteWireError: the template sent another packet.
        asyncio.TimeoutError: the answer takes longer than ANSWER_S.
    """
    loop, workers = asyncio.get_running_loop(), list[SurvivingWorker]()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        async with timeout(ANSWER_S):
            while (end := _receive_packets(sock, workers, _TURN)) is None:
                readable.clear()
                await readable.wait()
    except asyncio.TimeoutError:
        end = _receive_packets(sock, workers, MAX_WORKERS)  # it may have answered while this process stood still
        if end is None:
            raise
    finally:
        loop.remove_reader(sock.fileno())
    return workers, end


def _receive_packets(
    sock: socket.socket, workers: list[SurvivingWorker], most: int
) -> template_protocol.Inventory | None:
    """Receive the packets that wait on *sock*, *most* at most, and append the workers in them to *workers*. Return the
    Inventory packet that ends the template's answer, or None if that packet has not arrived yet.
    """
    for _ in range(most):
        try:
            data = sock.recv(template_protocol.MAX_PACKET)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("it ended")
        if len(workers) >= MAX_WORKERS:
            raise RemoteWireError(f"it lists more than {MAX_WORKERS:,} workers")
        packet = template_protocol.decode_to_agent(data)
        if isinstance(packet, template_protocol.Inventory):
            return packet
        if not isinstance(packet, SurvivingWorker):
            raise RemoteWireError(f"it said {type(packet).__name__}")
        workers.append(packet)
    return None


async def end_template(pid: int, pidfd: int, why: str, can_ask: bool, survivors: Survivors, user: str = "") -> None:
    """End a template of *user* that cannot be taken over; this takes a few seconds at most. Add its workers and the
    reason *why* to `survivors.lost`, and their processes to `survivors.processes`.

    If *can_ask* is true, the template first gets SIGTERM, so that it can end its workers itself.
    """
    for id, processes in processes_below(pid).items():
        known = id if survivors.may_be_of(id, user) else ""
        survivors.processes.setdefault(known, {}).update(processes)
        if known:
            survivors.lost[known] = why
    if can_ask:
        _signal(pidfd, signal.SIGTERM)
    if not can_ask or not await keeper_client.wait_for_end(pidfd, TEMPLATE_END_S):
        _signal(pidfd, signal.SIGKILL)
        await keeper_client.wait_for_end(pidfd, KILLED_S)


def processes_below(template: int) -> dict[str, dict[int, int]]:
    """Return all descendants of the process with pid *template*, by worker id ("" if unknown). For each worker, the
    result maps the pids of its processes to their starts in clock ticks since boot.

    A process has the worker id in its worker mark (an environment variable); without a mark, that of its parent or of
    the leader of its session.
    """
    stats = [stat for pid in procfs.subtree(template)[1:] if (stat := procfs.stat(pid)) is not None]
    owners: dict[int, str] = {}
    for stat in stats:  # parents come first
        owners[stat.pid] = procfs.mark_of(stat.pid) or owners.get(stat.parent, "")
    found: dict[str, dict[int, int]] = {}
    for stat in stats:
        owner = owners[stat.pid] or owners.get(stat.session, "")
        found.setdefault(owner, {})[stat.pid] = stat.started
    return found


# --- processes ---


async def sweep(ids: Collection[str], processes: dict[int, int], patience_s: float = 0.0) -> None:
    """Kill all processes of the workers *ids*, and also *processes*, which maps pids to their starts in clock ticks
    since boot. Return when no process is left, or after some seconds if a process does not end.

    If *patience_s* is more than 0, the processes first get that many seconds to make robots safe and to end by
    themselves.
    """
    if not ids and not processes:
        return
    if patience_s:
        begun = {pid: stat.started for pid in procfs.marked(ids) if (stat := procfs.stat(pid)) is not None}
        with contextlib.ExitStack() as stack:
            pidfds = [procfs.open_pidfd(pid, started) for pid, started in {**processes, **begun}.items()]
            pidfds = [pidfd for pidfd in pidfds if pidfd >= 0]
            for pidfd in pidfds:
                stack.callback(os.close, pidfd)
            await asyncio.gather(*(keeper_client.wait_for_end(pidfd, patience_s) for pidfd in pidfds))
    done = asyncio.Event()
    Sweep(asyncio.get_running_loop(), ids, processes, lambda *_: done.set())
    await done.wait()


def _signal(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


# --- agentd --reap ---


def spared(result: str, was_stopped: bool) -> str:
    """Return the reason why `agentd --reap` must leave the workers running, or "" if it must end them.

    *result* is systemd's $SERVICE_RESULT, or "" if a person runs the command. *was_stopped* is True if the last agentd
    was told to end with its workers.
    """
    if was_stopped or result in ("", "timeout"):  # timeout: it did not react to the order to stop, and was killed
        return ""
    if result == "success":
        return "it handed over: workers wait for the next agentd"
    return f"it ended unasked ({result}): workers wait for the next agentd, and end by themselves if none comes"


def reap(config: Config, result: str, keeper: str = "") -> int:
    """Carry out `agentd --reap`: end the templates, workers and other processes that the last agentd left. Return the
    exit code. Takes some seconds at most.

    If `spared` returns a reason to leave the workers running, end nothing. *config* names the run directory and the
    parent of the workers' cgroups. *result* is systemd's $SERVICE_RESULT. *keeper* is the socket of the keeper in
    rlinf-workers@.service, or "" without that unit.

    Raises:
        ConfigError: an agentd runs in that directory, or the directory belongs to another user.
        OSError: the directory cannot be read or written.
    """
    path = os.path.abspath(config.run_dir or default_run_dir(os.environ))
    why = spared(result, was_stopping(path))
    if why:
        log.info("nothing is ended in %s: %s", path, why)
        return 0
    if not os.path.isdir(path):
        log.info("there is nothing to reap: %s does not exist", path)
        return 0

    async def end_all() -> int:
        lost = (await take_inventory(path, keep=False)).lost
        cleared = asyncio.Event()
        if clear_cgroups(asyncio.get_running_loop(), find_roots(config, keeper), cleared.set):
            await cleared.wait()
        return len(lost)

    with contextlib.closing(RunDir.open(path, os.environ)) as directory:
        ended = asyncio.run(end_all())
        directory.begin()
        keeper_client.remove_files(f"{path}/keeper")  # it has ended with the last template
        remove_run_dirs(path)
    log.info("workers of an earlier agentd that were left in %s, and are ended: %d", path, ended)
    return 0
