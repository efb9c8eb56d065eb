"""WorkerOutput: what a driver does with the output of its job's workers: print it, and write it to log files.

agentds send the output in LogLines, by way of the head. The loop thread passes it on to threads of LogPrinter and
LogFiles. At the driver's end `flush` gets the rest.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.plurals import counted
from rlinf_actors.runtime import log_files
from rlinf_actors.runtime.log_files import LogFiles
from rlinf_actors.runtime.log_printer import END_S, LogPrinter, say
from rlinf_actors.runtime.log_view import LogView
from rlinf_actors.settings import Settings
from rlinf_actors.wire.agent_messages import LogLines
from rlinf_actors.wire.control_codec import Body

ANSWER_S = 0.5
"""Seconds beyond END_S that the agentds may take to report how many lines they did not send."""
STALLED_S = 15.0
"""Seconds without any output after which an ending driver with log files gives up. It waits while output arrives."""


class WorkerOutput:
    """The output of a job's workers in its driver. Loop thread, unless said otherwise.

    Args:
        directory: directory for log files (LogFiles), None for none.
        credit: sends a LogCredit to the head. Called on any thread.

    Raises:
        ConfigError: *directory* cannot be used.
    """

    def __init__(self, directory: str | None, credit: Callable[[Body], None]) -> None:
        if directory is not None:
            log_files.prepare(directory)
        self._directory = directory
        self._credit = credit
        self._files: LogFiles | None = None
        self._printer: LogPrinter | None = None
        self._cut = False
        self._flushed = 0  # agents that have answered FlushLogs
        self._came = asyncio.Event()

    def show(self, lines: LogLines) -> None:
        """Write *lines* to the log files, and print them."""
        if self._printer is None:
            printer: LogPrinter
            if self._directory is not None:
                self._files = LogFiles(self._directory, lambda lines: printer.show(lines), self._credit)
            settings = Settings.load()
            view = LogView(settings.log_rate, settings.log_join, self._all_of)
            credit = self._credit if self._files is None else self._files.printed
            printer = self._printer = LogPrinter(credit, settings.raw_output, view)
        (self._printer.show if self._files is None else self._files.write)(lines)
        self._flushed += lines.final
        self._came.set()

    def _all_of(self, name: str) -> str:
        """Return where all output of a worker or group is, for people."""
        if self._directory is None:
            return f"rlinf-actors logs {name}"
        path = log_files.log_path(self._directory, name)
        return path if ":" in name else os.path.dirname(path)

    async def flush(self, ask: Callable[[float], Awaitable[int]]) -> None:
        """Get, write and print the output that has not arrived, because the driver ends.

        Without log files this takes at most 2 * END_S + ANSWER_S; lines that come later are counted. With log files it
        takes as long as output arrives and is written; only the terminal is limited to END_S.

        Args:
            ask: asks the head to flush the logs within a number of seconds, and returns how many agentds will answer.
                It may raise RlinfActorsError.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + END_S
        hurry = None if self._directory is None else loop.call_at(until, self._hurry)
        try:
            agents = await ask(END_S if self._directory is None else STALLED_S)
            if self._directory is None:
                await asyncio.wait_for(self._flushed_by(agents), END_S + ANSWER_S)
            else:
                await self._flushed_by(agents, STALLED_S)
        except (RlinfActorsError, asyncio.TimeoutError):
            self._cut = True
        if self._files is not None:
            await self._written(self._files)
        if hurry is not None:
            hurry.cancel()
        if self._printer is None:
            return
        try:
            await asyncio.wait_for(self._after(self._printer.after), max(0.0, until - loop.time()))
        except asyncio.TimeoutError:
            self._cut = self._cut or self._files is None
            self._hurry()

    async def _written(self, files: LogFiles) -> None:
        """Wait until all output is written. If that is impossible for STALLED_S, give up."""
        try:
            await asyncio.wait_for(self._after(files.after), STALLED_S)
        except asyncio.TimeoutError:
            files.give_up()
            await self._after(files.after)

    async def _after(self, after: Callable[[Callable[[], object]], None]) -> None:
        """Wait until *after*, the method of a LogPrinter or LogFiles, has called its callback."""
        loop, reached = asyncio.get_running_loop(), asyncio.Event()
        after(lambda: call_threadsafe(loop, reached.set))
        await reached.wait()

    async def _flushed_by(self, agents: int, patience_s: float | None = None) -> None:
        """Wait until *agents* agentds have sent their last lines; raise TimeoutError after *patience_s* without any."""
        while self._flushed < agents:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), patience_s)

    def _hurry(self) -> None:
        if self._printer is not None:
            self._printer.hurry()
        if self._files is not None:
            self._files.hurry()

    @property
    def left(self) -> bool:
        """True if some output was not printed, or if that is unknown. Any thread."""
        return self._cut or bool(self._printer is not None and self._printer.left)

    def close(self, moved: tuple[str, str]) -> None:
        """Write and print what has arrived, and print how many lines were not printed and where they are. Blocks.

        *moved* is a directory of logs on this node, and where it is since the cluster has ended.
        """
        if self._files is not None:
            self._files.close()
        if self._printer is not None:
            self._printer.close()
            self._report(moved)

    def _report(self, moved: tuple[str, str]) -> None:
        left = dict(self._printer.left) if self._printer is not None else {}
        if self._files is not None:
            if left and not self._files.unwritten and not self._cut:
                unprinted = counted(sum(left.values()), "line", "was|were")
                say(f"{unprinted} not printed; {self._files.directory} has all")
                return
            if self._files.unwritten:
                say(f"{counted(self._files.unwritten, 'line')} could not be written to {self._files.directory}")
        for node in sorted({node for node, _ in left}):
            lines = sum(count for (of, _), count in left.items() if of == node)
            place = place_of(node, left, moved)
            where = f"{node}:{place} has all" if place else f"the log files of {node} have all"
            say(f"{counted(lines, 'line', 'was|were')} left out; {where}")
        if self._cut and not left:
            say("not every node has said whether all output was shown; the log files there have it")


def place_of(node: str, left: Mapping[tuple[str, str], int], moved: tuple[str, str]) -> str:
    """Return the file that has all lines of *node* that were left out, or the directory if several files may have them;
    "" if it is unknown. *left* is `LogPrinter.left`, *moved* that of `WorkerOutput.close`.
    """
    places = {place for of, place in left if of == node}
    known = sorted(place for place in places if os.path.isabs(place))  # a template may name others
    if not known:
        return ""
    where = known[0]
    if len(places) > 1:  # lines without a place are of any worker of the node
        where = os.path.commonpath([os.path.dirname(one) if one.endswith((".out", ".err")) else one for one in known])
    before, kept = moved
    return kept + where.removeprefix(before) if kept and where.startswith(f"{before}/") else where
