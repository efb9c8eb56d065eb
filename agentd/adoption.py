"""What an earlier agentd left in this run directory: templates that go on are found, everything else is ended.

The lock of the run directory is ours, so that no other agentd looks here. A template is taken over if it is the process
that its record names, of our protocol, and answers in time; else it is ended, and its workers with it. What carries the
mark of a worker that no template has is ended too: when `take_stock` is over nothing runs that we do not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agentd.ledger import Ledger
from agentd.sweep import Sweep
from agentd.templates import Process, Record, boot_id, make_directories, widen
from rlinf_actors import procfs
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire import spawn
from rlinf_actors.wire.messages import PROTOCOL
from rlinf_actors.wire.values import RunningWorker

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a template may take to say what it has; one that is stopped never does."""
TEMPLATE_END_S = spawn.ROBOT_END_S + 6.0
"""How long one that is told to end may take; it gives its workers ROBOT_END_S and 5 s."""
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


class _Unfit(Exception):
    """Why a template cannot be taken over; `asked` says whether it may be asked to end by itself."""

    def __init__(self, why: str, asked: bool = True) -> None:
        super().__init__(why)
        self.asked = asked


@dataclass
class Found:
    """A template that goes on, and the workers that it has, or whose ends the head may not know."""

    record: Record
    process: Process
    workers: list[spawn.Kept]
    since: float


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

    ledger: Ledger
    templates: list[Found] = field(default_factory=list)
    workers: dict[str, RunningWorker] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    since: float = 0.0


async def take_stock(run_dir: str, keep: bool) -> Survivors:
    """Find what an earlier agentd left, and end what cannot be taken over, which takes some seconds at most.

    Args:
        run_dir: the directory; its lock is ours.
        keep: whether workers are taken over at all.

    Raises:
        OSError: the directory cannot be read or written.
    """
    make_directories(Path(run_dir))
    ledger = Ledger(Path(run_dir, "l"))
    known = ledger.read()
    survivors = Survivors(ledger if keep else Ledger(None))
    records = _records(run_dir)
    asked = await asyncio.gather(*(_take_over(stem, one, keep, survivors.lost) for stem, one in records.items()))
    survivors.templates = [found for found in asked if found is not None]
    survivors.since = min((found.since for found in survivors.templates if found.workers), default=0.0)
    strays: set[str] = set()
    for found in survivors.templates:
        strays |= {kept.id for kept in found.workers if kept.id not in known}
        found.workers = [kept for kept in found.workers if kept.id in known]
        survivors.workers.update({kept.id: known[kept.id] for kept in found.workers})
    left = [known[id] for id in known.keys() - survivors.workers.keys()]
    for one in left:
        survivors.lost.setdefault(one.spec.id, "its agentd and the template that it came from had both ended")
    await _sweep([*strays, *(one.spec.id for one in left if not one.spec.claims)])
    await _sweep_robots([one.spec.id for one in left if one.spec.claims])
    if not keep:
        ledger.close()
    _remove_others(run_dir, {found.process.stem for found in survivors.templates})
    return survivors


def running(known: RunningWorker, kept: spawn.Kept) -> RunningWorker:
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
        except msgspec.DecodeError as error:
            log.error("%s is no record of a template (%s): what it was of ends by itself", path, error)
    return found


def _remove_others(run_dir: str, stems: set[str]) -> None:
    """The files of templates that are gone."""
    for path in Path(run_dir, "t").iterdir():
        if str(path.with_suffix("")) not in stems:
            path.unlink(missing_ok=True)


async def _take_over(stem: str, record: Record, keep: bool, lost: dict[str, str]) -> Found | None:
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
            if record.protocol != PROTOCOL:
                raise _Unfit(f"it speaks protocol {record.protocol}, this agentd {PROTOCOL}")
            workers, since = await _ask(sock, f"{stem}.sock", record)
        except _Unfit as why:
            lost.update(await _end(record, pidfd, why))
            return None
        stack.pop_all()
    log.info("template %d of an earlier agentd goes on, with %d workers", record.pid, len(workers))
    return Found(record, Process(record.pid, pidfd, sock, stem), workers, since)


def _open(record: Record) -> int:
    """A pidfd of the process that a record names, -1 if that is gone."""
    return procfs.open_pidfd(record.pid, record.started) if record.boot == boot_id() else -1


async def _ask(sock: socket.socket, path: str, record: Record) -> tuple[list[spawn.Kept], float]:
    """What a template has, and since when it has had no agentd that the head knew.

    Raises:
        _Unfit: it does not answer as it should.
    """
    try:
        sock.connect(path)
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if (pid, uid) != (record.pid, os.getuid()):
            raise _Unfit(f"process {pid} of user {uid} listens in its place")
        widen(sock)
        sock.send(spawn.encode(spawn.Adopt()))
        return await asyncio.wait_for(_inventory(sock), ANSWER_S)
    except (BlockingIOError, asyncio.TimeoutError):
        raise _Unfit(f"it did not answer within {ANSWER_S:g} s", asked=False) from None
    except (OSError, RemoteWireError) as error:
        raise _Unfit(f"it cannot be asked ({error})") from None


async def _inventory(sock: socket.socket) -> tuple[list[spawn.Kept], float]:
    loop, workers = asyncio.get_running_loop(), []
    while True:
        data = await loop.sock_recv(sock, spawn.MAX_PACKET)
        if not data:
            raise ConnectionResetError("it ended")
        packet = spawn.decode_to_agent(data)
        if isinstance(packet, spawn.Kept):
            workers.append(packet)
        elif isinstance(packet, spawn.Inventory):
            return workers, packet.since
        else:
            raise RemoteWireError(f"it said {type(packet).__name__}")


async def _end(record: Record, pidfd: int, why: _Unfit) -> dict[str, str]:
    """End a template that cannot be taken over; returns its workers, and why they ended."""
    text = f"its template, process {record.pid} of an earlier agentd, could not be taken over: {why}"
    marks = [procfs.mark_of(pid) for pid in procfs.subtree(record.pid)[1:]]
    workers = {mark: text for mark in marks if mark is not None}
    log.error("template %d is ended with %d workers: %s", record.pid, len(workers), why)
    if why.asked:
        _signal(pidfd, signal.SIGTERM)
    if not why.asked or not await _ended(pidfd, TEMPLATE_END_S):
        _signal(pidfd, signal.SIGKILL)
        await _ended(pidfd, TEMPLATE_END_S)
    return workers


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


# --- what nobody has ---


async def _sweep(ids: Iterable[str]) -> None:
    """Kill whatever carries the marks of these workers."""
    ids = list(ids)
    if not ids:
        return
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    Sweep(loop, ids, (), lambda _: done.set())
    await done.wait()


async def _sweep_robots(ids: list[str]) -> None:
    """The same for robot workers, which have the time that making a robot safe may take."""
    if not ids:
        return
    pidfds = []
    for pid in procfs.marked(ids):
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    await asyncio.gather(*(_ended(pidfd, spawn.ROBOT_END_S) for pidfd in pidfds))
    for pidfd in pidfds:
        os.close(pidfd)
    await _sweep(ids)
