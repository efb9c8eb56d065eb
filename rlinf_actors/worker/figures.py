"""The figures of this worker process, for agentd: its calls, what it has sent, its credit, and its channel.

agentd asks for them (worker_questions.ShowFigures), at most once in a second. `main` answers on the I/O thread, so
that a worker answers while its main thread blocks. No lock of other threads is waited for: what they change meanwhile
is read as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_actors import counters
from rlinf_actors.wire.figure_values import ChannelFigures, MethodFigures, PathFigures, WorkerFigures
from rlinf_actors.worker.executors import Activity

if TYPE_CHECKING:
    from rlinf_actors.messaging.messenger import Messenger

channel: Callable[[], ChannelFigures] | None = None
"""Returns the figures of the channel that this process hosts; None in a worker that is no channel host."""


def worker_figures(id: str, doing: Activity, messenger: Messenger, asked_at: float) -> WorkerFigures:
    """Return the figures of this process. *doing* is what it does now; agentd has asked at *asked_at*."""
    now = time.monotonic()
    unacknowledged, waiting = messenger.in_flight()
    return WorkerFigures(
        id,
        method=_text(doing.method),
        call_s=max(0.0, now - doing.since) if doing.method else 0.0,
        queued=doing.waiting,
        calls=[_of_method(name, counts) for name, counts in counters.calls().items()],
        sent=[PathFigures(path, *map(int, counts)) for path, counts in counters.sent_by_path().items()],
        unacknowledged_bytes=unacknowledged,
        waiting_messages=waiting,
        channel=None if channel is None else channel(),
        delay_s=max(0.0, now - asked_at) if asked_at else 0.0,
    )


def _of_method(name: str, counts: list[float]) -> MethodFigures:
    whole = [int(one) for one in counts]
    buckets = whole[counters.FIRST_BUCKET :]
    return MethodFigures(_text(name), whole[counters.DONE], whole[counters.FAILED], counts[counters.SECONDS], buckets)


def _text(name: str) -> str:
    return name[: counters.NAME_CHARS].encode("utf-8", "replace").decode()
