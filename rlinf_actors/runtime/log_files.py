"""LogFiles: writes the output of a job's workers to ``DIR/<group>/rank_<rank>.log`` on the driver's machine.

Theory of operation. agentd reads a worker's output from files on the worker's node, and sends it while it has credit.
This class returns the credit for lines only after it has written them, so what is not written stays in the files on the
node, however slow the driver or its disk is. Nothing is left out: if the disk is full, writing is tried again until it
succeeds or the driver gives up at its end.

The lines then go to the terminal's LogPrinter. A terminal that stands still holds the credit back once AHEAD bytes wait
for it: until the driver ends, or `hurry` is called, the log files run at most that far ahead of the terminal.

A thread of its own writes, because a disk may block. The other methods may be called on any thread.
"""

from __future__ import annotations

import collections
import contextlib
import getpass
import logging
import os
import queue
import re
import threading
from collections.abc import Callable

from rlinf_actors import exhaustion
from rlinf_actors.errors import ConfigError
from rlinf_actors.wire.agent_messages import CUT, UPDATE, LogCredit, LogLines
from rlinf_actors.wire.control_codec import Body

log = logging.getLogger(__name__)

AHEAD = 8 << 20
"""Most cost of lines that are written but not printed yet, before agentds get no more credit."""
AGAIN_S = 1.0
"""Seconds until writing is tried again after an error, such as a full disk."""
LONGEST_LINE = 16 << 20
"""Most characters of a line. In a longer line, lines of the other stream may come between its pieces."""
CLOSE_S = 15.0
"""Longest time that `close` waits for a write."""
OPEN_FILES = 64
"""Most files that are kept open. The one that was written longest ago is closed."""


def log_path(directory: str, worker: str) -> str:
    """Return the path of the log file of *worker*, ``group:rank``, below *directory*."""
    group, _, rank = worker.partition(":")
    folder = re.sub(r"[^A-Za-z0-9._-]", "_", group)
    if not folder.strip("."):
        folder = "_" * max(1, len(folder))  # "." and ".." are no names for a directory
    return os.path.join(directory, folder, f"rank_{re.sub(r'[^0-9]', '_', rank)}.log")


def prepare(directory: str) -> None:
    """Make *directory*, the argument ``distributed_log_dir`` of a Cluster.

    Raises:
        ConfigError: this process cannot make it or write there.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(0, "this process may not write there")
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be used ({error.strerror}): this driver writes the workers' log files, as user "
            f"{_user()}; choose a directory that this user can write to",
            path="distributed_log_dir",
        ) from None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class LogFiles:
    """The log files of a job's workers.

    Args:
        directory: the directory; `prepare` has made it.
        show: prints lines after they are written.
        credit: sends a LogCredit to the head.

    Attributes:
        directory: as given.
        unwritten: number of lines that were given up, because they could not be written until the driver's end.
    """

    def __init__(self, directory: str, show: Callable[[LogLines], object], credit: Callable[[Body], object]) -> None:
        self.directory = directory
        self.unwritten = 0
        self._show = show
        self._credit = credit
        self._lock = threading.Lock()
        self._ahead = 0
        self._withheld: collections.deque[LogCredit] = collections.deque()
        self._hurry = False
        self._giving_up = threading.Event()
        self._files: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._unended: dict[tuple[str, str], str] = {}  # pieces of a line, by path and stream
        self._bars: dict[tuple[str, str], str] = {}  # last states of progress bars
        self._queue: queue.SimpleQueue[LogLines | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rlinf-actors-log-files", daemon=True)
        exhaustion.start(self._thread)

    def write(self, lines: LogLines) -> None:
        """Write *lines*, which an agentd has sent. The queue stays short, since agentd sends no more without credit."""
        self._queue.put(lines)

    def printed(self, credit: Body) -> None:
        """Note that lines were printed, whose cost is in *credit*."""
        assert isinstance(credit, LogCredit)
        self._release(credit.chars)

    def hurry(self) -> None:
        """Return credit without waiting for the terminal from now on, because the driver ends."""
        self._hurry = True
        self._release(0)

    def after(self, callback: Callable[[], object]) -> None:
        """Call *callback* on the thread of this object after all lines given to `write` so far are written."""
        self._queue.put(callback)

    def give_up(self) -> None:
        """Stop retrying: lines that cannot be written are counted in `unwritten`."""
        self._giving_up.set()

    def close(self) -> None:
        """Write what is queued, close the files and end the thread. Blocks."""
        self.hurry()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():  # the disk does not answer
            self.give_up()
            log.error(
                "%s: writing there did not end within %g s; the last lines may be missing", self.directory, CLOSE_S
            )

    def _release(self, printed: int) -> None:
        credits = []
        with self._lock:
            self._ahead -= printed
            while self._withheld and (self._hurry or self._ahead <= AHEAD):
                credits.append(self._withheld.popleft())
        for credit in credits:
            self._credit(credit)

    def _run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                if callable(entry):
                    entry()
                    continue
                self._write(entry)
                with self._lock:
                    self._ahead += entry.cost
                    self._withheld.append(LogCredit(entry.owner, entry.node, entry.cost))
                self._show(entry)
                self._release(0)
            for (path, _), text in [*self._unended.items(), *self._bars.items()]:
                self._append(path, memoryview(f"{text}\n".encode(errors="backslashreplace")), 1)
        finally:
            for file in self._files.values():
                os.close(file)

    def _write(self, lines: LogLines) -> None:
        texts: dict[str, list[str]] = {}
        for worker, stream, text in lines.entries:
            path = log_path(self.directory, worker)
            self._bars.pop((path, stream), None)
            if text.endswith(UPDATE):
                self._bars[path, stream] = text.removesuffix(UPDATE)
                continue
            whole = self._unended.pop((path, stream), "")
            if text.endswith(CUT):  # a long line comes in pieces, and lines of the other stream may come between them
                whole += text.removesuffix(CUT)
                if len(whole) < LONGEST_LINE:
                    self._unended[path, stream] = whole
                    continue
            else:
                whole += f"{text}\n"
            texts.setdefault(path, []).append(whole)
        for path, parts in texts.items():
            self._append(path, memoryview("".join(parts).encode(errors="backslashreplace")), len(parts))

    def _append(self, path: str, data: memoryview, lines: int) -> None:
        """Append *data* to a file. If that fails, try again until it succeeds or `give_up` was called."""
        complained = False
        while data:
            try:
                data = data[os.write(self._opened(path), data) :]
                continue
            except OSError as error:
                self._forget(path)  # perhaps it was removed, with its directory
                if self._giving_up.is_set():
                    self.unwritten += lines
                    return
                if not complained:
                    log.error("%s: cannot be written (%s); it is tried again", path, error.strerror)
                    complained = True
            self._giving_up.wait(AGAIN_S)
        if complained:
            log.warning("%s: can be written again, and nothing was left out", path)

    def _opened(self, path: str) -> int:
        file = self._files.get(path)
        if file is None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = self._files[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(path)
        return file

    def _forget(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
