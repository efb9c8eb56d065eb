"""The ExitReport of a worker: its text for errors and log lines, whether the worker failed, and its limits. Pure."""

from __future__ import annotations

import signal as signals

from msgspec.structs import replace

from rlinf_actors.wire.values import CHANNEL_GROUPS, ExitReport

TAIL_LINES, TAIL_LINE_CHARS = 20, 4097
"""Largest number of lines, and of characters in a line, of a worker's stderr in an exit report (template.log_pump)."""
REASON_CHARS = 16384
"""Largest length of the reason in an exit report, which may be the traceback of a failed import."""
LEFT = "a process that it left behind could not be killed"
"""Part of the reason in an exit report of a template: the worker has ended, and a process that it started has not."""
_MEMORY = {"yes": "; it was out of memory", "suspected": "; out of memory suspected"}


def ending(report: ExitReport) -> str:
    """Return how a worker ended, as a clause that follows the worker's name.

    For example ``was ended by signal 9 (SIGKILL); out of memory suspected``.
    """
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
    """True if this end of a worker of *group* is not a failure.

    The end is orderly if the worker was asked to end. It is also orderly if the worker hosts a channel and exited with
    code 0: a host exits by itself once the channel is closed and every item was taken.
    """
    if report.kind == "stopped":
        return True
    return report.kind == "exited" and report.exit_code == 0 and group.startswith(CHANNEL_GROUPS)


def cut(report: ExitReport) -> ExitReport:
    """Return an exit report with the lines of stderr and the reason cut to their limits."""
    tail = [line[:TAIL_LINE_CHARS] for line in report.stderr_tail[-TAIL_LINES:]]
    return replace(report, stderr_tail=tail, reason=report.reason[:REASON_CHARS])
