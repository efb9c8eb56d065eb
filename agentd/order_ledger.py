"""What this agentd was asked to start, on disk, for one that comes after it.

A file for each order of the head (StartWorkers), in the run directory's ``l``; it is removed when the head knows of the
end of all its workers. Of a template that is gone too nothing else says which workers there were.

What the head may still ask about: orders on disk, and ends that it has not acknowledged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import msgspec

from agentd.templates import Template, write_file
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.values import RunningWorker

log = logging.getLogger(__name__)


class Ledger:
    """The files.

    Args:
        directory: exists, is ours alone; None to write nothing down.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._open: dict[Path, set[str]] = {}
        self._of: dict[str, Path] = {}
        self._numbers = count(1)

    def read(self) -> dict[str, RunningWorker]:
        """The workers that earlier agentds were asked for, by id, as far as they are not settled."""
        found: dict[str, RunningWorker] = {}
        for path in self._directory.glob("*.tmp") if self._directory is not None else ():
            path.unlink()  # of one that was killed while it wrote
        for path in sorted(self._directory.glob("*.start")) if self._directory is not None else ():
            try:
                order = msgspec.msgpack.decode(path.read_bytes(), type=StartWorkers)
            except (msgspec.DecodeError, OSError) as error:
                log.error("%s cannot be read (%s): its workers, if there are any, are not taken over", path, error)
                path.unlink(missing_ok=True)
                continue
            self._enter(path, order)
            for spec in order.workers:
                found[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, detached=order.detached)
        return found

    def write(self, order: StartWorkers) -> None:
        """Workers are about to be started.

        Raises:
            OSError: that cannot be written down.
        """
        if self._directory is None or not order.workers:
            return
        path = self._directory / f"{os.getpid()}-{next(self._numbers)}.start"
        while path.exists():  # of an earlier agentd with our pid
            path = self._directory / f"{os.getpid()}-{next(self._numbers)}.start"
        write_file(path, msgspec.msgpack.encode(order))
        self._enter(path, order)

    def settled(self, ids: Iterable[str]) -> None:
        """The head knows that these have ended."""
        for id in ids:
            path = self._of.pop(id, None)
            if path is not None:
                self._open[path].discard(id)
                if not self._open[path]:
                    del self._open[path]
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()

    def close(self) -> None:
        """Everything has ended: no file stays."""
        self.settled(list(self._of))

    def _enter(self, path: Path, order: StartWorkers) -> None:
        ids = [spec.id for spec in order.workers]
        for id in ids:
            if id in self._of:  # asked for again: the younger order counts
                self.settled([id])
            self._of[id] = path
        self._open[path] = set(ids)


class Unsettled:
    """Workers from their order until the head knows of their end. Loop thread only.

    Args:
        ledger: what was asked for; a next agentd reads it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ended: dict[str, Template] = {}

    def ordered(self, order: StartWorkers) -> None:
        """Workers are about to be started.

        Raises:
            OSError: that cannot be written down.
        """
        self._ledger.write(order)

    def ended(self, id: str, template: Template) -> None:
        """A worker has ended; its template remembers how, for a next agentd, until that is settled."""
        if not template.gone:
            self._ended[id] = template

    def has(self, id: str) -> bool:
        """Whether this worker has ended, the head may not know it, and its template does."""
        return id in self._ended

    @property
    def templates(self) -> set[Template]:
        """Those that remember an end that the head may not know."""
        return set(self._ended.values())

    def template(self, id: str) -> Template | None:
        """Who remembers how this worker ended; None if it has not, or that is settled, or nobody does."""
        return self._ended.get(id)

    def settled(self, ids: Iterable[str]) -> None:
        """The head knows how these workers ended."""
        self._ledger.settled(ids)
        for id in ids:
            template = self._ended.pop(id, None)
            if template is not None:
                template.send(template_protocol.Settled([id]))

    def template_gone(self, template: Template) -> None:
        """A template has ended, and remembers nothing."""
        self._ended = {id: one for id, one in self._ended.items() if one is not template}

    def close(self) -> None:
        """Everything has ended, and nothing stays on disk."""
        self._ledger.close()
