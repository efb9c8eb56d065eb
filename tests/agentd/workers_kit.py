"""Children with a stand-in worker, and their reports."""

import asyncio
import contextlib
import os
import sys
import uuid
from pathlib import Path

import pace

from agentd.launch_plan import Rules, Site, template_key
from agentd.template_start import TemplateStarter
from agentd.workers import Workers
from rlinf_actors import procfs
from rlinf_actors.wire.agent_messages import LogLines, StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import WorkerSpec

HERE = Path(__file__).parent


def spec(rank=0, *, do="", first="", group="g", env=None, **fields):
    return WorkerSpec(
        id=uuid.uuid4().hex,
        group=group,
        namespace=fields.pop("namespace", "ns"),
        rank=rank,
        world_size=1,
        node_rank=0,
        env={"DO": do, "FIRST": first, **(env or {})},
        **fields,
    )


def order(specs, owner="driver"):
    """An order of the head."""
    return StartWorkers(list(specs), owner, "m:C")


class Reports:
    """Records all reports; `until` waits for a fact about them."""

    def __init__(self):
        self.ready, self.exits, self.lines, self.order = {}, {}, [], []
        self.children = None
        self.credit = True
        self._changed = asyncio.Event()

    def __call__(self, report):
        self.order.append(report)
        if isinstance(report, WorkerReady):
            self.ready[report.id] = report
        elif isinstance(report, WorkerExited):
            assert report.id not in self.exits, "a worker ends once"
            self.exits[report.id] = report.exit
        elif isinstance(report, LogLines):
            self.lines += report.entries
            if self.credit:
                asyncio.get_running_loop().call_soon(self.children.credit_logs, report.cost, report.owner)
        self._changed.set()

    async def until(self, fact):
        while not fact():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), pace.PATIENCE_S)
            except asyncio.TimeoutError:
                raise AssertionError(f"nothing more was reported after {self.order}") from None
        return self

    async def up(self, *specs):
        """Wait until all are ready or gone; none may be gone."""
        ids = {s.id for s in specs}
        await self.until(lambda: ids <= self.ready.keys() | self.exits.keys())
        assert not ids & self.exits.keys(), [self.exits[i] for i in ids & self.exits.keys()]
        return [self.ready[s.id] for s in specs]

    async def gone(self, one):
        await self.until(lambda: one.id in self.exits)
        return self.exits[one.id]

    async def line(self, text):
        await self.until(lambda: any(text in entry[2] for entry in self.lines))
        return next(entry for entry in self.lines if text in entry[2])


def make(tmp_path, *, env=None, rules=None, ledger=None, health=None, first=False, **site):
    """Children and their reports; *rules* and *site* are fields of theirs. If *first*, a template is ordered
    before they exist.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(HERE), **(env or {})}
    reports = Reports()
    loop = asyncio.get_running_loop()
    node = Site(
        Rules("n0", str(tmp_path / "log"), **(rules or {})),
        run_dir,
        WorkerPlace(str(run_dir), "host", "ipc:///nowhere", "n0", "127.0.0.1", "", "", ""),
        environment=lambda: env,
        **{"entry": "standin:run_worker", **site},
    )
    starter = TemplateStarter.of_site(loop, node)
    made = Workers(
        loop,
        node,
        reports,
        starter=starter,
        ordered=starter.order(template_key(sys.executable, env, ()), env) if first else None,
        ledger=ledger,
        health=health,
    )
    reports.children = made
    return made, reports


@contextlib.asynccontextmanager
async def children(tmp_path, **options):
    """Children and their reports; afterwards no process, fd or file may be left."""
    before, others = open_fds(), procfs.children(os.getpid())  # multiprocessing may have one of its own
    run_dir = tmp_path / "run"
    made, reports = make(tmp_path, **options)
    try:
        yield made, reports
    finally:
        await made.close(0.2)
    left = {
        "files": [name for name in ("w", "t") if os.listdir(run_dir / name)],
        "marked": procfs.marked([r.id for r in reports.order if isinstance(r, (WorkerReady, WorkerExited))]),
        "children": [procfs.stat(pid) for pid in procfs.children(os.getpid()) if pid not in others],
        "fds": {fd: name for fd, name in open_fds().items() if before.get(fd) != name},
    }
    if any(left.values()):
        raise AssertionError(left)


def open_fds():
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)}


def _exists(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")
