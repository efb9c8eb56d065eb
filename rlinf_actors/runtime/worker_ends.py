"""The errors of calls to workers that have ended or refuse them, and log lines that no call reports: of deaths, and of
workers that wait in breakpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf_actors.errors import (
    AuthenticationError,
    InternalError,
    NodeLostError,
    ProtocolMismatchError,
    RlinfActorsError,
    WorkerDiedError,
    WorkerStartError,
)
from rlinf_actors.model.readable import duration
from rlinf_actors.wire import frames
from rlinf_actors.wire.debug_values import attach_command
from rlinf_actors.wire.endings import ending, orderly
from rlinf_actors.wire.values import ExitReport, WorkerPulse, WorkerState

if TYPE_CHECKING:
    from rlinf_actors.runtime.remote_group import RemoteGroup

log = logging.getLogger(__name__)

_REJECTIONS: dict[str, type[RlinfActorsError]] = {"protocol": ProtocolMismatchError, "internal": InternalError}


def rejection(frame: frames.Rejected, worker: str, node: str) -> RlinfActorsError:
    """Return the error of all calls to *worker* on *node*, which has rejected the link of this process by *frame*."""
    return _REJECTIONS.get(frame.kind, AuthenticationError)(f"{worker} on {node}: {frame.text}")


def death(report: ExitReport, worker: str, rank: int, node: str) -> RlinfActorsError:
    """Return the error of calls to a worker that has ended.

    Args:
        report: how the worker ended.
        worker: name of the worker, ``group:rank``.
        rank: rank of the worker.
        node: name of the worker's node.
    """
    if report.kind == "start_failed":
        return WorkerStartError(f"{worker} on {node} {ending(report)}", worker=worker, node=node)
    if report.kind == "node_lost":
        return NodeLostError(f"{worker} is gone with its node {node}: {report.reason or 'the node stopped answering'}")
    lines = "".join(f"\n    {line}" for line in report.stderr_tail)
    tail = f"\nlast lines of its stderr:{lines}" if lines else ""
    return WorkerDiedError(
        f"worker {worker} on {node} {ending(report)}{tail}",
        worker=worker,
        rank=rank,
        node=node,
        exit_code=report.exit_code,
        signal=report.signal,
        oom=report.oom,
        stderr_tail=report.stderr_tail,
    )


def note_deaths(group: RemoteGroup, workers: Sequence[WorkerState]) -> int:
    """Return how many of *workers* the head reports as dead for the first time, if this process owns *group*.

    Log each death, unless a pending call gets it as an error. Call it before `RemoteGroup.update`.
    """
    deaths = 0
    for worker in workers:
        before, exit = group.states.get(worker.rank), worker.exit
        if exit is None or orderly(group.name, exit) or group.closing or not group.owned:
            continue
        if before is None or before.exit is not None or not 0 <= worker.rank < len(group.peers):
            continue
        deaths += 1
        peer = group.peers[worker.rank]
        if not peer.pending:
            log.warning("%s", death(exit, peer.name, peer.rank, peer.node))
    return deaths


def note_breakpoint(name: str, namespace: str, before: WorkerState | None, now: WorkerState) -> None:
    """Log that a worker, by its name, waits in a breakpoint, if it did not in its last state *before*."""
    pulse, earlier = now.pulse or WorkerPulse(), (before and before.pulse) or WorkerPulse()
    if pulse.breakpoint and not (earlier.breakpoint and earlier.stop == pulse.stop):
        log.warning("%s waits in a breakpoint at %s: %s", name, pulse.breakpoint, attach_command(name, namespace))


def breakpoint_clause(name: str, namespace: str, pulse: WorkerPulse, now: float) -> str:
    """Return where a worker, by its name, has been waiting in a breakpoint at the time *now* of the head, for how long,
    and how to attach.
    """
    waited = duration(max(0.0, now - pulse.breakpoint_since))
    return f"at {pulse.breakpoint} for {waited}: {attach_command(name, namespace)}"
