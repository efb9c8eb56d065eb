"""Workers' lines in the driver's terminal, on a thread of its own: a slow terminal stalls nothing else."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from rlinf_actors.wire.agents import LogCredit, LogLines
from rlinf_actors.wire.messages import Body


class LogPrinter:
    """Prints ``[group:rank@node] text``.

    Args:
        shown: called with a LogCredit for what was printed, so that the sender may go on. Printer's thread.
    """

    def __init__(self, shown: Callable[[Body], None]) -> None:
        self._shown = shown
        self._queue: queue.SimpleQueue[LogLines | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rlinf-actors-logs", daemon=True)
        self._thread.start()

    def show(self, lines: LogLines) -> None:
        """Print soon. Any thread. Memory is bounded by the credit that the sender has."""
        self._queue.put(lines)

    def close(self) -> None:
        """Print what is left and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            for stream, group in _by_stream(lines):
                out = sys.stderr if stream == "err" else sys.stdout
                if out is None:
                    continue  # pythonw, or a script that closed it
                try:
                    out.write("".join(f"{line}\n" for line in group))
                    out.flush()
                except (OSError, ValueError):
                    continue  # the terminal or pipe is gone; the files have every line
            self._shown(LogCredit(lines.owner, lines.node, lines.cost))


def _by_stream(lines: LogLines) -> list[tuple[str, list[str]]]:
    """Runs of lines of one stream, in order, with their prefix."""
    runs: list[tuple[str, list[str]]] = []
    for worker, stream, text in lines.entries:
        if not runs or runs[-1][0] != stream:
            runs.append((stream, []))
        runs[-1][1].append(f"[{worker}@{lines.node}] {text}")
    if lines.skipped:
        runs.append(("err", [f"[{lines.node}] {lines.skipped} lines are not shown here; the log files have them"]))
    return runs
