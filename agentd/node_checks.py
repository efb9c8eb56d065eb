"""The facts and tests of this node for `rlinf-actors doctor`, on request of the head. Loop thread only.

Facts are read on a thread; the libraries of accelerators run in child processes. Tests of paths block threads of their
own, at most MOST_TESTS at a time, each for a bounded time. Nothing of a user is run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agentd.users import User, as_user
from rlinf_actors.diagnosis import machine, paths
from rlinf_actors.diagnosis.recent_log import recent_lines
from rlinf_actors.exhaustion import explain
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.net.loop import Tasks
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion, Interpreter, NodeFacts, PathAnswer, PathTest

if TYPE_CHECKING:
    from agentd.launch_plan import Site
    from agentd.log_reader import LogReader
    from agentd.templates import TemplatePool
    from agentd.worker_process import WorkerProcess

MOST_TESTS = 6
"""Most tests of paths at a time in which this node takes part."""
MOST_INTERPRETERS = 32
FACTS_S = 5.0
"""Seconds to wait for the file systems with packages and logs. One that hangs is a fault in the answer."""

Send = Callable[[CheckAnswer], object]


class NodeChecks:
    """Answers questions for facts, and takes the steps of tests of paths.

    Args:
        site: settings of this node.
        workers: the running workers, by id.
        templates: the templates, which know the import paths of workers.
        log_reader: knows the log files.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        workers: Mapping[str, WorkerProcess],
        templates: TemplatePool,
        log_reader: LogReader,
    ) -> None:
        self._loop = loop
        self._site = site
        self._workers = workers
        self._templates = templates
        self._log_reader = log_reader
        self._tasks = Tasks(loop)
        self._listeners: dict[int, paths.Listener] = {}  # by port
        self._tests = 0
        self._threads = ThreadPoolExecutor(MOST_TESTS, "path-test")  # a listener blocks one for seconds

    def ask(self, question: CheckQuestion, send: Send) -> None:
        """Answer *question* by *send*; a question for the time at once."""
        if question.facts or question.log or question.path is not None:
            self._tasks.start(self._answer(question, send), "checking this node")
        else:
            send(CheckAnswer(time.time()))

    def close(self) -> None:
        """Drop all questions, and end all tests. May be called again."""
        self._tasks.cancel()
        for listener in list(self._listeners.values()):
            listener.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, question: CheckQuestion, send: Send) -> None:
        facts = await self._facts() if question.facts else None
        path = await self._step(question.path) if question.path is not None else None
        lines = recent_lines() if question.log else []
        send(CheckAnswer(time.time(), facts, path, lines))

    # --- facts ---

    async def _facts(self) -> NodeFacts:
        site, faults = self._site, []
        found = machine.collect(site.rules.cgroups, len(self._workers))
        counts = {one.type: len(one.infos) for one in site.resources if not one.registered_by}
        accelerator_types = {kind.value for kind in ACCELERATOR_TABLE}
        accelerators = sum(count for kind, count in counts.items() if kind in accelerator_types)
        held = self._tasks.start(machine.holders(counts, site.environment(), self._workers), "asking for holders")
        imports = self._imports()
        logs = self._tasks.start(self._log_reader.usage(), "reading the logs' sizes")
        read = self._tasks.start(_interpreters(imports), "reading packages")
        await asyncio.wait([logs, read], timeout=FACTS_S)
        if not (logs.done() and read.done()):
            faults.append("its file system with packages or logs does not answer")
        holders, more = await held
        return replace(
            found,
            interpreters=[*found.interpreters, *(read.result() if read.done() else [])],
            logs=logs.result() if logs.done() else None,
            holders=holders[:1024],
            faults=[*faults, *more][:64],
            accelerators=accelerators,
            robots=sum(counts.values()) - accelerators,
        )

    def _imports(self) -> list[tuple[machine.Imports, User | None]]:
        """Return the import paths of the running templates, each with the user of the template."""
        found: dict[tuple[str, tuple[str, ...], str], tuple[set[str], User | None]] = {}
        for template in self._templates.running:
            if template.ready:
                key = template.key.interpreter, template.paths, template.key.user
                found.setdefault(key, (set(), template.user))[0].update(template.key.preload)
        every = [
            (machine.Imports(interpreter, places, tuple(sorted(modules))), user)
            for (interpreter, places, _), (modules, user) in found.items()
        ]
        return every[:MOST_INTERPRETERS]

    # --- tests of paths ---

    async def _step(self, test: PathTest) -> PathAnswer:
        if test.step == "heard":
            listener = self._listeners.get(test.port)
            if listener is None:
                return PathAnswer()
            heard = listener.heard()
            listener.close()  # its test is over: it must not keep others waiting
            return PathAnswer(heard=heard)
        if self._tests >= MOST_TESTS:
            return PathAnswer(fault=f"the node takes part in {MOST_TESTS} tests of paths already", kind="failed")
        if test.step == "listen":
            return self._listen(test)
        self._tests += 1
        try:
            return await self._loop.run_in_executor(self._threads, paths.measure, test)
        finally:
            self._tests -= 1

    def _listen(self, test: PathTest) -> PathAnswer:
        try:
            listener = paths.Listener(test.ip)
        except OSError as error:
            return PathAnswer(fault=f"it cannot listen at {test.ip}: {explain(error)}", kind="failed")
        self._listeners[listener.port] = listener
        self._tests += 1
        self._tasks.start(self._serve(listener, test), "the test of a path")
        return PathAnswer(port=listener.port, secret=listener.secret)

    async def _serve(self, listener: paths.Listener, test: PathTest) -> None:
        try:
            await self._loop.run_in_executor(self._threads, listener.serve, test.size, test.limit_s)
        finally:
            self._tests -= 1
            self._listeners.pop(listener.port, None)
            listener.close()


async def _interpreters(imports: list[tuple[machine.Imports, User | None]]) -> list[Interpreter]:
    return list(await asyncio.gather(*(asyncio.to_thread(_interpreter, *one) for one in imports)))


def _interpreter(imports: machine.Imports, user: User | None) -> Interpreter:
    """Return what an interpreter of workers can import. Any thread."""
    with as_user(user):
        return machine.interpreter_of(imports)
