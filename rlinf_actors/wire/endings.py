"""How a worker ended, as a clause for people. Pure."""

from __future__ import annotations

import signal as signals

from rlinf_actors.wire.values import ExitReport

CHANNEL_GROUPS = "channel@"
"""Before a channel's name: the name of the group of its hosts."""

_MEMORY = {"yes": "; it was out of memory", "suspected": "; out of memory suspected"}


def ending(report: ExitReport) -> str:
    """For example ``was ended by signal 9 (SIGKILL); out of memory suspected``, to follow the worker's name."""
    reason = f"; {report.reason}" if report.reason else ""
    if report.kind == "start_failed":
        return f"could not be started: {report.reason}"
    if report.kind == "node_lost":
        return f"is gone with its node: {report.reason or 'the node stopped answering'}"
    if report.signal is not None:
        try:
            how = f"was ended by signal {report.signal} ({signals.Signals(report.signal).name})"
        except ValueError:
            how = f"was ended by signal {report.signal}"
    elif report.exit_code is not None:
        how = f"exited with code {report.exit_code}"
    else:
        how = "ended, and nobody saw how"
    return f"{how}{_MEMORY.get(report.oom, '')}{reason}"


def orderly(group: str, report: ExitReport) -> bool:
    """True if this end of a worker of *group* is no failure.

    A worker that was asked to end is stopped. The host of a channel exits with code 0 by itself once the channel was
    closed and every item was taken.
    """
    if report.kind == "stopped":
        return True
    return report.kind == "exited" and report.exit_code == 0 and group.startswith(CHANNEL_GROUPS)
