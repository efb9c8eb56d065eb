"""What an earlier agentd left in this run directory: templates that go on are found, everything else is ended.

The lock of the run directory is ours, so that no other agentd looks here. A template is taken over if it is the process
that its record names, of our protocol, and answers in time; else it is ended, and its workers with it. What carries the
mark of a worker that no template has is ended too: when `take_inventory` is over nothing runs that we do not know.

What templates that are not taken over leave: found while they still live, and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agentd.config import Config
from agentd.keeper_client import remove_files as remove_keeper_files
from agentd.launch_plan import roots
from agentd.run_dir import OrderLedger, RunDir, boot_id, default_run_dir, make_directories, was_stopping
from agentd.sweep import Sweep, clear_cgroups
from agentd.templates import Process, Record, widen
from rlinf_actors import procfs
from rlinf_actors.compat import timeout
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.unix_sockets import peer_of
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL, spoken
from rlinf_actors.wire.values import RunningWorker

TEMPLATE_END_S = template_protocol.ROBOT_END_S + 1.0
"""How long a template that is told to end may take: it gives robot workers ROBOT_END_S, and kills others at once."""
KILLED_S = 1.0
"""How long the end of one that was killed is waited for: one in an uninterruptible call may never end."""


@dataclass
class Remains:
    """Workers whose templates were ended.

    Attributes:
        lost: ids of workers, and why they ended.
        processes: what ran below their templates, by the worker's id, "" where that cannot be told: pids, and when each
            began (clock ticks since boot). Of one that hides its mark nothing else tells later whose it was.
    """

    lost: dict[str, str] = field(default_factory=dict)
    processes: dict[str, dict[int, int]] = field(default_factory=dict)

    def of(self, ids: Iterable[str]) -> dict[int, int]:
        """The processes of these workers."""
        return {pid: started for id in ids for pid, started in self.processes.get(id, {}).items()}


async def end_template(pid: int, pidfd: int, why: str, asked: bool, remains: Remains) -> None:
    """End a template that cannot be taken over, and add its workers to *remains*; takes some seconds at most.

    Args:
        pid: its.
        pidfd: of it.
        why: becomes the reason of its workers' ends.
        asked: whether it has the time to end its workers itself.
        remains: of all.
    """
    for id, processes in below(pid).items():
        remains.processes.setdefault(id, {}).update(processes)
        if id:
            remains.lost[id] = why
    if asked:
        _signal(pidfd, signal.SIGTERM)
    if not asked or not await _ended(pidfd, TEMPLATE_END_S):
        _signal(pidfd, signal.SIGKILL)
        await _ended(pidfd, KILLED_S)


def below(template: int) -> dict[str, dict[int, int]]:
    """What runs below a template, as Remains.processes: whose it is tells its mark, its parent, or its session."""
    stats = [stat for pid in procfs.subtree(template)[1:] if (stat := procfs.stat(pid)) is not None]
    owners: dict[int, str] = {}
    for stat in stats:  # parents come first
        owners[stat.pid] = procfs.mark_of(stat.pid) or owners.get(stat.parent, "")  # what is branded is found later
    found: dict[str, dict[int, int]] = {}
    for stat in stats:
        owner = owners[stat.pid] or owners.get(stat.session, "")
        found.setdefault(owner, {})[stat.pid] = stat.started
    return found


async def sweep(ids: Iterable[str], processes: dict[int, int]) -> None:
    """Kill whatever carries the marks of these workers, and these processes."""
    ids = list(ids)
    if not ids and not processes:
        return
    done = asyncio.Event()
    Sweep(asyncio.get_running_loop(), ids, processes, lambda _: done.set())
    await done.wait()


async def sweep_robots(ids: Iterable[str], processes: dict[int, int]) -> None:
    """The same for what may be robot workers, which have the time that making a robot safe may take."""
    ids = list(ids)
    if not ids and not processes:
        return
    begun = {pid: stat.started for pid in procfs.marked(ids) if (stat := procfs.stat(pid)) is not None}
    with contextlib.ExitStack() as stack:
        pidfds = [procfs.open_pidfd(pid, started) for pid, started in {**processes, **begun}.items()]
        pidfds = [pidfd for pidfd in pidfds if pidfd >= 0]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        await asyncio.gather(*(_ended(pidfd, template_protocol.ROBOT_END_S) for pidfd in pidfds))
    await sweep(ids, processes)


def _signal(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def _ended(pidfd: int, patience_s: float) -> bool:
    """Wait for a process's end; whether it came."""
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    loop.add_reader(pidfd, end.set)
    try:
        await asyncio.wait_for(end.wait(), patience_s)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a template may take to say what it has; one that is stopped never does."""


class _Unfit(Exception):
    """Why a template cannot be taken over; `asked` says whether it may be asked to end by itself."""

    def __init__(self, why: str, asked: bool = True) -> None:
        super().__init__(why)
        self.asked = asked


@dataclass
class Found:
    """A template that goes on, and the workers that it has, or whose ends the head may not know.

    Attributes:
        strays: those that the ledger does not know; they are ended.
    """

    record: Record
    process: Process
    workers: list[template_protocol.SurvivingWorker]
    inventory: template_protocol.Inventory
    strays: list[template_protocol.SurvivingWorker] = field(default_factory=list)


@dataclass
class Survivors:
    """What is taken over.

    Attributes:
        ledger: the files of what earlier agentds were asked for.
        templates: those that go on.
        workers: who the workers of these are.
        lost: ids of workers that were ended because they could not be taken over, and why.
        since: when the last agentd that the head had registered was gone (CLOCK_MONOTONIC, in seconds), 0 if nobody
            who goes on can tell.
    """

    ledger: OrderLedger
    templates: list[Found] = field(default_factory=list)
    workers: dict[str, RunningWorker] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    since: float = 0.0


async def take_inventory(run_dir: str, keep: bool) -> Survivors:
    """Find what an earlier agentd left, and end what cannot be taken over, which takes some seconds at most.

    Args:
        run_dir: the directory; its lock is ours.
        keep: whether workers are taken over at all.

    Raises:
        OSError: the directory cannot be read or written.
    """
    make_directories(Path(run_dir))
    ledger = OrderLedger(Path(run_dir, "l"))
    known = ledger.read()
    survivors = Survivors(ledger if keep else OrderLedger(None))
    remains = Remains(survivors.lost)
    records = _records(run_dir)
    asked = await asyncio.gather(*(_take_over(stem, one, keep, remains) for stem, one in records.items()))
    survivors.templates = [found for found in asked if found is not None]
    others = set(remains.processes)
    for found in survivors.templates:
        found.strays = [kept for kept in found.workers if kept.id not in known]
        others |= {kept.id for kept in found.strays}
        found.workers = [kept for kept in found.workers if kept.id in known]
        survivors.workers.update({kept.id: known[kept.id] for kept in found.workers})
    survivors.since = min((found.inventory.since for found in survivors.templates if found.workers), default=0.0)
    left = [known[id] for id in known.keys() - survivors.workers.keys()]
    for one in left:
        survivors.lost.setdefault(one.spec.id, "its agentd and the template that it came from had both ended")
    plain = {one.spec.id for one in left if not one.spec.claims}
    others = (others | {one.spec.id for one in left}) - plain  # of whom nothing is known may have robots
    await asyncio.gather(sweep(plain, remains.of(plain)), sweep_robots(others - {""}, remains.of(others)))
    if not keep:
        ledger.close()
    _remove_others(run_dir, {found.process.stem for found in survivors.templates})
    return survivors


def unspoken(run_dir: str) -> list[int]:
    """Return the protocols of running templates that this agentd could only end."""
    found = []
    for record in _records(run_dir).values():
        pidfd = -1 if _speaks(record) else _open(record)
        if pidfd >= 0:
            os.close(pidfd)
            found.append(record.protocol)
    return found


def running(known: RunningWorker, kept: template_protocol.SurvivingWorker) -> RunningWorker:
    """A worker as the head is told of it."""
    told = msgspec.structs.replace(known, pid=kept.pid, exit=kept.exit)
    up = kept.up
    if up is None:
        return told
    return msgspec.structs.replace(told, endpoint=up.endpoint, port=up.port, master_port=up.master_port)


# --- one template ---


def _records(run_dir: str) -> dict[str, Record]:
    """What says which templates there were, by the stems of their files."""
    found = {}
    for path in sorted(Path(run_dir, "t").glob("*.json")):
        try:
            found[str(path.with_suffix(""))] = msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            continue  # the template has ended since the list was made, and has removed its files itself
        except msgspec.DecodeError as error:
            log.error("%s is no record of a template (%s): what it was of ends by itself", path, error)
    return found


def _remove_others(run_dir: str, stems: set[str]) -> None:
    """The files of templates that are gone."""
    for path in Path(run_dir, "t").iterdir():
        if str(path.with_suffix("")) not in stems:
            path.unlink(missing_ok=True)


async def _take_over(stem: str, record: Record, keep: bool, remains: Remains) -> Found | None:
    """A template by its record; None if it is gone, or cannot be taken over: then it has been ended."""
    pidfd = _open(record)
    if pidfd < 0:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, pidfd)
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.setblocking(False)
        try:
            if not keep:
                raise _Unfit("workers are not kept here")
            if not _speaks(record):
                raise _Unfit(f"it speaks protocol {record.protocol}, this agentd {spoken(OLDEST, PROTOCOL)}")
            workers, inventory = await _ask(sock, f"{stem}.sock", record)
        except _Unfit as why:
            text = f"its template, process {record.pid} of an earlier agentd, could not be taken over: {why}"
            log.error("template %d is ended, and its workers: %s", record.pid, why)
            await end_template(record.pid, pidfd, text, why.asked, remains)
            return None
        stack.pop_all()
    log.info("template %d of an earlier agentd goes on, with %d workers", record.pid, len(workers))
    return Found(record, Process(record.pid, pidfd, sock, stem), workers, inventory)


def _speaks(record: Record) -> bool:
    return OLDEST <= record.protocol <= PROTOCOL


def _open(record: Record) -> int:
    """A pidfd of the process that a record names, -1 if that is gone."""
    return procfs.open_pidfd(record.pid, record.started) if record.boot == boot_id() else -1


async def _ask(
    sock: socket.socket, path: str, record: Record
) -> tuple[list[template_protocol.SurvivingWorker], template_protocol.Inventory]:
    """Return the workers of a template, and the last packet of its answer.

    Raises:
        _Unfit: it does not answer as it should.
    """
    try:
        sock.connect(path)
        pid, uid = peer_of(sock)
        if (pid, uid) != (record.pid, os.getuid()):
            raise _Unfit(f"process {pid} of user {uid} listens in its place")
        widen(sock)
        sock.send(template_protocol.encode(template_protocol.Adopt()))
        return await _inventory(sock)
    except (BlockingIOError, asyncio.TimeoutError):
        raise _Unfit(f"it did not answer within {ANSWER_S:g} s", asked=False) from None
    except (OSError, RemoteWireError) as error:
        raise _Unfit(f"it cannot be asked ({error})") from None


async def _inventory(
    sock: socket.socket,
) -> tuple[list[template_protocol.SurvivingWorker], template_protocol.Inventory]:
    """Its answer.

    Raises:
        OSError: it ended.
        RemoteWireError: it says something else.
        TimeoutError: it did not answer within ANSWER_S; asyncio's.
    """
    loop, workers = asyncio.get_running_loop(), list[template_protocol.SurvivingWorker]()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        async with timeout(ANSWER_S):
            while (end := _take(sock, workers)) is None:
                readable.clear()
                await readable.wait()
    except asyncio.TimeoutError:
        end = _take(sock, workers)  # it may have answered while this process stood still
        if end is None:
            raise
    finally:
        loop.remove_reader(sock.fileno())
    return workers, end


def _take(sock: socket.socket, workers: list[template_protocol.SurvivingWorker]) -> template_protocol.Inventory | None:
    """Take what is there, without waiting; returns its end if that has come."""
    while True:
        try:
            data = sock.recv(template_protocol.MAX_PACKET)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("it ended")
        packet = template_protocol.decode_to_agent(data)
        if isinstance(packet, template_protocol.Inventory):
            return packet
        if not isinstance(packet, template_protocol.SurvivingWorker):
            raise RemoteWireError(f"it said {type(packet).__name__}")
        workers.append(packet)


def spared(result: str, stop_asked: bool) -> str:
    """Why nothing is to be ended, "" if it is. Pure.

    Args:
        result: $SERVICE_RESULT, "" where systemd does not run us.
        stop_asked: whether that agentd was told to end with its workers.
    """
    if not result or stop_asked:
        return ""
    if result == "timeout":  # it did not even hear that it was to stop, and was killed for that
        return ""
    if result == "success":
        return "it handed over: workers wait for the next agentd"
    return f"it ended unasked ({result}): workers wait for the next agentd, and end by themselves if none comes"


def reap(config: Config, result: str, keeper: str = "") -> int:
    """End templates, workers and what they left; returns the exit code. Takes some seconds at most.

    Where they are spared it takes no time: systemd starts the next agentd after this.

    Args:
        config: names the run directory and where cgroups are.
        result: see `spared`.
        keeper: the socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: an agentd runs there, or the directory is not ours.
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
    with contextlib.closing(RunDir.open(path, os.environ)) as directory:
        ended = asyncio.run(_end(path, config, keeper))
        directory.begin()
        remove_keeper_files(f"{path}/keeper")  # it has ended with the last template
    log.info("workers of an earlier agentd that were left in %s, and are ended: %d", path, ended)
    return 0


async def _end(path: str, config: Config, keeper: str) -> int:
    """End all of it; returns how many workers there were."""
    ended = (await take_inventory(path, keep=False)).lost
    cleared = asyncio.Event()
    if clear_cgroups(asyncio.get_running_loop(), roots(config, keeper), cleared.set):
        await cleared.wait()
    return len(ended)
