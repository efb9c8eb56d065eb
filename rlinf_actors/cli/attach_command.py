"""The command `rlinf-actors attach`: talk to the debugger of a worker that waits in a breakpoint.

The head and the worker's agentd pass each question on to the worker, which answers when there is something to say.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import click
from msgspec.structs import replace

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import echo, note
from rlinf_actors.cli.queries import Observer, head_option, observing, status_of
from rlinf_actors.cli.stack_command import Place
from rlinf_actors.cli.worker_command import job_option, place_of
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.readable import duration
from rlinf_actors.net import discovery
from rlinf_actors.net.loop import Tasks, call_threadsafe
from rlinf_actors.plurals import counted
from rlinf_actors.security.keyfile import who
from rlinf_actors.wire.client_messages import Events, GetEvents, Status
from rlinf_actors.wire.debug_values import (
    FREE,
    MAX_INPUT,
    OVER,
    REPLACED,
    DebugAnswer,
    DebugQuestion,
)
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.protocol import expected

WAIT_S = 10.0
"""Seconds that a worker waits for something to say."""
ANSWER_S = 12.0
"""Seconds that the head has to answer, in addition: it waits for a node for up to 10 s."""
EVENT_S = 3.0
"""Seconds to wait for the event of a worker's start or end, after its agentd has said that it does not run."""


@click.command()
@click.argument("target", metavar="GROUP:RANK", shell_complete=complete.workers)
@job_option
@click.option(
    "--wait", "waits", is_flag=True, help="Wait until the worker reaches a breakpoint, also if it is starting."
)
@head_option
def attach(target: str, job: str, waits: bool, head: str | None) -> None:
    """Attach a debugger (pdb) to a worker that waits in `breakpoint()`.

    `continue` lets the worker go on, and ends this command. The end of the input (Ctrl-D) detaches: the worker waits
    on. Ctrl-C interrupts a command of the debugger that runs; at the prompt, or if the command goes on, it detaches.
    Who attaches later takes over. The commands of the debugger may come from a pipe.

    A debugger runs code in the worker, so only its driver and the administrator may attach.
    """
    endpoint, status = status_of(head)
    place = place_of(status, target, job)
    try:
        asyncio.run(_attach(endpoint, status, target, place, waits))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _attach(endpoint: str, status: Status, target: str, place: Place, waits: bool) -> None:
    """Talk to the debugger of a worker until the person detaches or the worker goes on.

    Raises:
        RlinfActorsError: the worker does not answer, waits in no breakpoint, or another one has come.
    """
    group, worker = place
    node = next((node for node in status.nodes if node.rank == worker.node_rank), None)
    if node is None:
        raise UsageError(f"the node of {target} is not known to the head")
    node_id = node.report.node_id
    question = DebugQuestion(group.namespace, worker.id, uuid.uuid4().hex, who())
    keyboard = _Keyboard(asyncio.get_running_loop())
    typed: asyncio.Future[str] | None = None
    starting = worker.state == "starting"
    this = asyncio.current_task()
    assert this is not None
    interrupts = _Interrupts(asyncio.get_running_loop(), this.cancel)
    async with observing(endpoint, discovery.client_settings()) as client, _tasks() as tasks:

        def ask() -> asyncio.Task[DebugAnswer]:
            return tasks.start(_ask(client, node_id, question), "asking", expected=RlinfActorsError)

        began = expected(await client.request(GetEvents(-1, namespace=group.namespace), ANSWER_S), Events)
        asked = ask()
        while True:
            waiting: list[asyncio.Future[Any]] = [asked, interrupts.pressed, *([typed] if typed is not None else [])]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if interrupts.pressed.done():
                interrupts.again()
                question = replace(question, number=question.number + 1, input="", interrupts=True)
                asked.cancel()
                asked = ask()
                continue
            if typed is not None and typed.done():  # the worker answers the question before when it has this one
                text, typed = typed.result(), None
                if not text:
                    note(f"detached: {target} waits on in its breakpoint")
                    return
                interrupts.allowed = True
                question = replace(question, number=question.number + 1, input=text)
                asked.cancel()
                asked = ask()
                continue
            answer = asked.result()
            if answer.fault:
                event = await _event_of(client, question, began, waits and starting)
                if event is not None and event.exit is None and starting:
                    starting = False
                    asked = ask()
                    continue
                raise RlinfActorsError(f"{target}: {event.text if event is not None else answer.fault}")
            if answer.state == REPLACED:
                raise RlinfActorsError(f"{answer.by} has attached to {target} meanwhile: this attachment is over")
            if answer.state == FREE and not waits:
                raise RlinfActorsError(
                    f"{target} waits in no breakpoint: put breakpoint() into its code, and attach when it is there "
                    f"(--wait waits for that); `rlinf-actors stack {target}` shows what it does"
                )
            if question.stop == 0 and answer.stop:
                note(f"{target} waits in a breakpoint at {answer.place}, thread {answer.thread}; Ctrl-D detaches")
            _show(answer, question)
            if answer.runs_s and question.stop == 0:
                age = duration(answer.runs_s)
                note(f"a command of the debugger has been running for {age}: Ctrl-C interrupts it")
                interrupts.allowed = True
            if answer.state == OVER:
                more = (
                    f"; {counted(answer.queued, 'more thread', 'waits|wait')} in breakpoints" if answer.queued else ""
                )
                note(f"{target} goes on{more}")
                return
            if answer.asks and typed is None:
                interrupts.allowed = False
                typed = keyboard.read()
            number = question.number or 1  # 0 is of an attachment that begins
            end = answer.offset + len(answer.output) if answer.stop else -1
            question = replace(question, number=number, input="", stop=answer.stop, offset=end, wait_s=WAIT_S)
            question = replace(question, interrupts=False)
            asked = ask()


async def _ask(client: Observer, node_id: str, question: DebugQuestion) -> DebugAnswer:
    limit_s = ANSWER_S + question.wait_s
    ask = client.listen if question.wait_s else client.request
    return answer_of(await ask(AskNode(node_id, question), limit_s), DebugAnswer)


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks()
    try:
        yield tasks
    finally:
        await tasks.close()


def _show(answer: DebugAnswer, question: DebugQuestion) -> None:
    if 0 <= question.offset < answer.offset:
        note(f"[{counted(answer.offset - question.offset, 'character', 'is|are')} left out]")
    if answer.output:
        echo(answer.output, nl=False)


async def _event_of(client: Observer, question: DebugQuestion, began: Events, patient: bool) -> ClusterEvent | None:
    """Return the next start or end of the worker since *began*; None if there is none soon and *patient* is False."""
    events = began
    while True:
        asked = GetEvents(events.next, events.log, question.namespace, wait_s=EVENT_S)
        events = expected(await client.listen(asked, ANSWER_S), Events)
        for event in events.events:
            if event.worker_id == question.worker and (event.exit is not None or event.kind == "worker_started"):
                return event
        if not events.events and not patient:
            return None


class _Interrupts:
    """Ctrl-C: interrupts the command that the debugger runs, once; otherwise it ends this command.

    Attributes:
        allowed: True while a command runs that has not been interrupted.
        pressed: ends with Ctrl-C while a command runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[], object]) -> None:
        self._loop = loop
        self._end = end
        self.allowed = False
        self.pressed: asyncio.Future[None] = loop.create_future()
        loop.add_signal_handler(signal.SIGINT, self._press)

    def again(self) -> None:
        """Wait for the next Ctrl-C."""
        self.pressed = self._loop.create_future()

    def _press(self) -> None:
        if not self.allowed:
            self._end()
            return
        self.allowed = False
        self.pressed.set_result(None)


class _Keyboard:
    """Reads the standard input, as much at a time as the debugger has asked for, on a thread of its own.

    The thread is a daemon: a read of a terminal cannot be ended when the worker goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wanted = threading.Semaphore(0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ended = False
        self._reads: asyncio.Future[str] | None = None

    def read(self) -> asyncio.Future[str]:
        """Return the future of the next lines, at most MAX_INPUT characters; "" at the end of the input."""
        if self._reads is None:
            threading.Thread(target=self._run, name="stdin", daemon=True).start()
        self._reads = self._loop.create_future()
        self._wanted.release()
        return self._reads

    def _run(self) -> None:
        while self._wanted.acquire():
            text = self._next()
            call_threadsafe(self._loop, self._took, text)

    def _next(self) -> str:
        text = ""
        while not self._ended and not text.endswith("\n") and len(text) < MAX_INPUT // 2:
            try:
                data = os.read(0, MAX_INPUT // 2)
            except OSError:  # the terminal is gone
                data = b""
            self._ended = not data
            text += self._decoder.decode(data, final=not data)
        return text if not text or text.endswith("\n") or not self._ended else f"{text}\n"

    def _took(self, text: str) -> None:
        assert self._reads is not None
        if not self._reads.done():
            self._reads.set_result(text)
