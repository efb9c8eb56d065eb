"""The errors of calls to workers that have ended."""

from __future__ import annotations

from rlinf_actors.errors import NodeLostError, RlinfActorsError, WorkerDiedError, WorkerStartError
from rlinf_actors.wire.values import ExitReport, ending


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
