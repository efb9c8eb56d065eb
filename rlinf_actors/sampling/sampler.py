"""Asks the head and the nodes in rounds, and gives what they answer to the Board. Loop thread.

A round asks the head for its status and each node for its figures, at most ASKED_NODES at a time. Nothing is asked more
often than that, however many look at a page or read the metrics. Events are waited for beside the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from rlinf_actors.errors import AuthenticationError, RlinfActorsError
from rlinf_actors.model.log_lines import SlicedLines
from rlinf_actors.net.link import Network
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.sampling.sample import Board, Sample
from rlinf_actors.wire.client_messages import Events, GetEvents, GetStatus, Status
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.figure_values import FigureQuestion, NodeFigures
from rlinf_actors.wire.log_values import LogQuestion, LogSlice
from rlinf_actors.wire.node_questions import AskNode, NodeQuestion, answer_of
from rlinf_actors.wire.protocol import expected
from rlinf_actors.wire.stack_values import StackAnswer, StackQuestion, WorkerStacks
from rlinf_actors.wire.values import NodeState

ASKED_NODES = 16
"""Most nodes that are asked at a time."""
STATUS_S = 5.0
"""Seconds that the head has to answer for its status."""
FIGURES_S = 12.0
"""Seconds that the head has to answer for a node: it waits for the node for up to 10 s."""
EVENTS_S = 20.0
"""Seconds for which the head keeps a question for events that has no answer yet."""
AGAIN_S = 2.0
"""Seconds to the next question for events after a failed one."""
REFUSED_S = 15.0
"""Seconds to the next round after the head has refused this process's key."""
OUTPUT_BYTES = 64 << 10
"""Bytes of a log file that are read for its last lines: what a node sends at once."""
USABLE = ("ready", "suspect", "draining")

T = TypeVar("T")


class Sampler:
    """Asks in rounds.

    Args:
        network: makes the connection to the head.
        endpoint: the head's endpoint.
        every_s: seconds between two rounds.
        on_sample: called after each round, and after new events.
    """

    def __init__(
        self, network: Network, endpoint: str, every_s: float, on_sample: Callable[[], object] = lambda: None
    ) -> None:
        self.board = Board()
        self.endpoint = endpoint
        self.every_s = every_s
        self.on_sample = on_sample
        self._network = network
        self._client = self._connect()
        self._again_s = every_s
        self._by_job = False  # this process has a driver's key

    def close(self) -> None:
        """Close the connection to the head. May be called again."""
        self._client.close()

    async def run(self) -> None:
        """Ask in rounds until this task is cancelled. A failed round is part of the Board."""
        while True:
            sample = await self.round()
            self.board.take(sample)
            self.on_sample()
            spent = time.monotonic() - sample.clock
            await asyncio.sleep(max(0.1, self._again_s - spent))

    async def run_events(self) -> None:
        """Wait for events until this task is cancelled."""
        since, log = 0, ""
        while True:
            try:
                found = await self._ask(GetEvents(since, log, wait_s=EVENTS_S), Events, EVENTS_S + STATUS_S)
            except RlinfActorsError:  # the next round says why
                await asyncio.sleep(AGAIN_S)
                continue
            since, log = found.next, found.log
            if found.events:
                self.board.take_events(found.events)
                self.on_sample()

    async def round(self) -> Sample:
        """Ask once, and return what was found. A failure is part of it."""
        at, clock = time.time(), time.monotonic()
        try:
            found = await self.sample()
        except (RlinfActorsError, OSError) as error:
            self._again_s = REFUSED_S if isinstance(error, AuthenticationError) else self.every_s
            with contextlib.suppress(OSError):  # no descriptor is left: the next round tries again
                self._client.close()
                self._client = self._connect()  # else a refusal of the key after a reconnection is not seen
            return Sample(at, clock, fault=str(error), took_s=time.monotonic() - clock)
        self._again_s = self.every_s
        return found

    async def sample(self) -> Sample:
        """Ask once, and return what was found.

        Raises:
            RlinfActorsError: the head does not answer, or refuses.
            OSError: there is no connection to the head.
        """
        at, clock = time.time(), time.monotonic()
        status = await self._ask(GetStatus(), Status, STATUS_S)
        answer_s = time.monotonic() - clock
        figures: dict[str, NodeFigures] = {}
        faults: dict[str, str] = {}
        at_once = asyncio.Semaphore(ASKED_NODES)

        async def ask(node: NodeState) -> None:
            id = node.report.node_id
            if node.state not in USABLE:
                return
            try:
                async with at_once:
                    found = await self._figures(status, node)
            except RlinfActorsError as error:
                faults[id] = str(error)
                return
            if found is not None:
                figures[id] = found

        await asyncio.gather(*(ask(node) for node in status.nodes))
        return Sample(at, clock, status, figures, faults, "", answer_s, time.monotonic() - clock)

    async def _figures(self, status: Status, node: NodeState) -> NodeFigures | None:
        """Return the figures of a node, with those workers that this process's key may see. A driver's key may ask for
        one of its jobs at a time, and has no figures of a node without a worker of its jobs: the result is None then.
        """
        id = node.report.node_id
        if not self._by_job:
            try:
                return await self._ask_node(id, FigureQuestion(), NodeFigures)
            except AuthenticationError:
                self._by_job = True
        jobs = {group.namespace for group in status.groups for worker in group.workers if worker.node_rank == node.rank}
        answers = [await self._ask_node(id, FigureQuestion(job), NodeFigures) for job in sorted(jobs)]
        workers = [worker for answer in answers for worker in answer.workers]
        return replace(answers[-1], workers=workers) if answers else None

    async def stacks(self, node_id: str, job: str, ids: Sequence[str]) -> list[WorkerStacks]:
        """Return the stacks of workers of one job on a node.

        Raises:
            RlinfActorsError: the head or the node does not answer, or refuses.
        """
        return (await self._ask_node(node_id, StackQuestion(job, list(ids)), StackAnswer)).workers

    async def last_lines(self, node_id: str, job: str, name: str, most: int) -> list[str]:
        """Return the last *most* lines of the log file *name* of a job, of at most OUTPUT_BYTES bytes.

        Raises:
            RlinfActorsError: the head or the node does not answer, or refuses, or there is no such file.
        """
        found = await self._slice(node_id, LogQuestion(job, name, offset=-OUTPUT_BYTES))
        data, begin = found.data, found.offset - len(found.data)
        if not begin and data.count(b"\n") < most:  # it has begun anew meanwhile, or the worker has said little
            with contextlib.suppress(RlinfActorsError):  # there is no older part
                older = await self._slice(node_id, LogQuestion(job, f"{name}.1", offset=-OUTPUT_BYTES))
                data, begin = older.data + data, older.offset - len(older.data)
        lines: list[str] = []
        sliced: SlicedLines[None] = SlicedLines(lambda line, _: lines.append(line), most)
        sliced.feed(data.partition(b"\n")[2] if begin else data)
        sliced.end()
        return lines

    async def _slice(self, node_id: str, question: LogQuestion) -> LogSlice:
        answer = await self._ask_node(node_id, question, LogSlice)
        if answer.fault:
            raise RlinfActorsError(answer.fault)
        return answer

    async def _ask(self, question: Body, kind: type[T], timeout_s: float) -> T:
        return expected(await self._client.request(question, timeout_s), kind)

    async def _ask_node(self, id: str, question: NodeQuestion, kind: type[T]) -> T:
        return answer_of(await self._client.request(AskNode(id, question), FIGURES_S), kind)

    def _connect(self) -> ControlClient:
        return ControlClient(self._network, self.endpoint, _identity(), lambda notice: None)


def _identity() -> bytes:
    return f"observer:{uuid.uuid4().hex}".encode()
