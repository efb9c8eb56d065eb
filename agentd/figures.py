"""The figures of this node and its workers: what they use and have done, on request of the head. Loop thread only.

agentd collects them at most once in COLLECT_S, however many ask: it asks the workers' I/O threads (worker_questions),
and reads /proc and the file systems on a thread. Accelerators are read by a child process (hardware.probe_child), at
most once in DEVICES_S, because their libraries may hang.

House rules: a file system or library that does not answer delays nothing else. What was found last is sent then.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from agentd.run_dir import boot_id
from rlinf_actors import procfs
from rlinf_actors.diagnosis.machine import SHARED_MEMORY, disk_figures
from rlinf_actors.net.loop import Tasks
from rlinf_actors.wire.figure_values import (
    DeviceFigures,
    DiskFigures,
    FigureQuestion,
    NodeFigures,
    ProcessFigures,
    WorkerFigures,
)

if TYPE_CHECKING:
    from agentd.launch_plan import Site
    from agentd.worker_process import WorkerProcess
    from agentd.worker_questions import WorkerQuestions

COLLECT_S = 1.0
"""Seconds for which figures are sent again instead of being collected anew."""
DEVICES_S = 15.0
"""Seconds between two readings of the accelerators, each of which takes a child process some tenths of a second."""
DEVICES_LIMIT_S = 10.0
"""Seconds that a reading of the accelerators may take."""
READ_S = 1.0
"""Seconds to wait for /proc and the file systems. One that hangs is not asked again until it has answered."""
LAG_S = 0.05
"""Seconds of the timer whose delay shows how busy the loop is."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
T = TypeVar("T")


class FigureCollector:
    """Answers the head's questions for figures.

    Args:
        workers: the running workers, by id.
        questions: asks the workers.
        site: the node's directories, environment and hardware.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Mapping[str, WorkerProcess],
        questions: WorkerQuestions,
        site: Site,
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._questions = questions
        self._site = site
        self._tasks = Tasks(loop)
        self._waiting: list[tuple[FigureQuestion, Callable[[NodeFigures], object]]] = []
        self._found = NodeFigures()
        self._jobs: dict[str, str] = {}  # by id of the workers in `_found`
        self._found_at = -math.inf
        self._kinds = _kinds(site)
        self._devices: dict[str, list[DeviceFigures]] = {}
        self._held: dict[int, int] = {}  # bytes of accelerators' memory, by process
        self._devices_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._disks: list[DiskFigures] = []
        self._reads: set[str] = set()  # what is being read

    def ask(self, asked: FigureQuestion, send: Callable[[NodeFigures], object]) -> None:
        """Call *send* with the answer, within a few seconds."""
        if self._loop.time() - self._found_at < COLLECT_S:
            self._answer(asked, send)
            return
        self._waiting.append((asked, send))
        if len(self._waiting) == 1:
            self._tasks.start(self._collect(), "collecting figures", failed=lambda _: self._waiting.clear())

    def close(self) -> None:
        """Drop all questions. May be called again."""
        self._waiting.clear()
        self._tasks.cancel()

    def _answer(self, asked: FigureQuestion, send: Callable[[NodeFigures], object]) -> None:
        found, job = self._found, asked.namespace
        workers = [one for one in found.workers if job in (None, self._jobs.get(one.id))]
        now = self._loop.time()
        age_s, devices_age_s = now - self._found_at, now - self._devices_at if found.devices else 0.0
        send(replace(found, workers=workers, age_s=max(0.0, age_s), devices_age_s=max(0.0, devices_age_s)))

    async def _collect(self) -> None:
        if self._kinds and self._reading is None and self._loop.time() - self._devices_at >= DEVICES_S:
            self._reading = self._tasks.start(self._read_devices(), "reading the accelerators")
        workers = dict(self._workers)
        lag: asyncio.Future[float] = self._loop.create_future()
        answered: asyncio.Future[list[WorkerFigures]] = self._loop.create_future()
        due = self._loop.time() + LAG_S
        self._loop.call_at(due, lambda: _resolve(lag, max(0.0, self._loop.time() - due)))
        self._questions.ask_figures(list(workers), lambda found: _resolve(answered, found))
        pids = {id: (worker.pid, worker.pidfd) for id, worker in workers.items() if worker.pidfd >= 0}
        held = self._held
        nothing: tuple[dict[str, ProcessFigures], dict[str, int], NodeFigures] = {}, {}, NodeFigures()
        processes, memory, machine = await self._read(
            "processes", lambda: (_processes(pids), _of_workers(held, pids), _machine()), nothing
        )
        self._disks = await self._read("disks", lambda: _disks(self._places()), self._disks)
        found = await answered
        self._jobs = {id: worker.spec.namespace for id, worker in workers.items()}
        self._found = replace(
            machine,
            workers=[
                replace(one, process=processes.get(one.id), accelerator_bytes=memory.get(one.id, -1)) for one in found
            ],
            lag_s=await lag,
            devices=[device for kind in self._kinds for device in self._devices.get(kind, [])],
            disks=self._disks,
        )
        self._found_at = self._loop.time()
        waiting, self._waiting = self._waiting, []
        for order, send in waiting:
            self._answer(order, send)

    async def _read(self, what: str, read: Callable[[], T], last: T) -> T:
        """Return the result of *read*, which runs on a thread; *last* if it does not return in READ_S, or still hangs
        from before.
        """
        if what in self._reads:
            return last
        self._reads.add(what)
        task = self._tasks.start(asyncio.to_thread(read), f"reading {what}")
        task.add_done_callback(lambda _: self._reads.discard(what))
        done, _ = await asyncio.wait([task], timeout=READ_S)
        return task.result() if done else last

    def _places(self) -> list[tuple[str, str]]:
        return [("run", str(self._site.run_dir)), ("logs", self._site.rules.log_dir), ("memory", SHARED_MEMORY)]

    async def _read_devices(self) -> None:
        from rlinf_actors.hardware.child_process import run_child
        from rlinf_actors.hardware.probe import read_answer

        try:
            env, module = self._site.environment(), "rlinf_actors.hardware.probe_child:measure_main"
            held: dict[int, int] = {}
            for kind in self._kinds:
                end = await run_child(module, [kind], env=env, timeout_s=DEVICES_LIMIT_S)
                report = read_answer(end, kind, DEVICES_LIMIT_S)
                for _, pid, size in report.held:
                    if size > 0:  # else the driver does not say it
                        held[pid] = held.get(pid, 0) + size
                self._devices[kind] = [
                    DeviceFigures(
                        kind, info.utilization, info.temperature, info.memory_bytes or -1, info.memory_used_bytes
                    )
                    for info in report.infos
                ]
            self._held = held
            self._devices_at = self._loop.time()
        finally:
            self._reading = None


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _kinds(site: Site) -> list[str]:
    """Return the node's types of accelerators that a built-in vendor reads; none on a node that is only described."""
    from rlinf_actors.hardware.vendors.catalog import VENDORS

    built_in = {vendor.kind.value for vendor in VENDORS}
    return [one.type for one in site.resources if one.type in built_in and not one.registered_by]


# --- on a thread ---


def _processes(pids: Mapping[str, tuple[int, int]]) -> dict[str, ProcessFigures]:
    found = {}
    for id, (pid, pidfd) in pids.items():
        figures = process_figures(pid)
        if figures is not None and not procfs.has_ended(pidfd):  # else the pid may be another process's
            found[id] = figures
    return found


def _of_workers(held: Mapping[int, int], pids: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return how much memory of accelerators the processes of each worker hold, by the worker's id. A worker is left
    out if none is known to hold any. *held* has the bytes of each process, *pids* the workers' own processes.
    """
    ids = {pid: id for id, (pid, _) in pids.items()}
    found: dict[str, int] = {}
    for pid, size in held.items():
        id = ids.get(pid) or procfs.mark_of(pid)  # a process that the worker has started has its mark
        if id is not None and id in pids:
            found[id] = found.get(id, 0) + size
    return found


def process_figures(pid: int) -> ProcessFigures | None:
    """Return what the process *pid* uses, None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # another user's
        descriptors = None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return ProcessFigures(cpu_s, max(0, int(fields[21])) * _PAGE, int(fields[17]), descriptors)


def _machine() -> NodeFigures:
    busy = procfs.text_of("/proc/stat").partition("\n")[0].split()[1:9]
    user, nice, system, _idle, _iowait, *rest = (int(one) for one in busy)
    memory = _memory(procfs.text_of("/proc/meminfo").splitlines())
    return NodeFigures(
        agentd=process_figures(os.getpid()) or ProcessFigures(),
        cpu_s=(user + nice + system + sum(rest)) / _TICKS,
        cpus=os.cpu_count() or 0,
        load=os.getloadavg()[0],
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
        machine=boot_id(),
    )


def _memory(lines: Iterable[str]) -> dict[str, int]:
    words = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in words if len(row) > 1 and row[1].isdigit()}


def _disks(places: Sequence[tuple[str, str]]) -> list[DiskFigures]:
    return [disk for purpose, path in places if (disk := disk_figures(purpose, path)) is not None]
