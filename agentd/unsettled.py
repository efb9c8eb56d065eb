"""What the head may still ask about: orders on disk, and ends that it has not acknowledged."""

from __future__ import annotations

from collections.abc import Iterable

from agentd.ledger import Ledger
from agentd.templates import Template
from rlinf_actors.wire import spawn
from rlinf_actors.wire.agents import StartWorkers


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
                template.send(spawn.Settled([id]))

    def template_gone(self, template: Template) -> None:
        """A template has ended, and remembers nothing."""
        self._ended = {id: one for id, one in self._ended.items() if one is not template}

    def close(self) -> None:
        """Everything has ended, and nothing stays on disk."""
        self._ledger.close()
