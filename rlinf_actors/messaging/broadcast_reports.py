"""The reports of members that broadcasts cannot go on although all members live. They are kept, by stream.

A member may hear of a failure before its own user calls broadcast(). And a tree that has failed so never works again:
its stream is named after the ids of its workers, and these workers cannot exchange messages any more.
"""

from __future__ import annotations

import threading

from rlinf_actors.errors import PeerDiedError, RlinfActorsError
from rlinf_actors.messaging.mailbox import Recent
from rlinf_actors.wire import frames


class FailureReports:
    """The reports that one worker has received or sent. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: Recent[tuple[str, int], frames.BroadcastFailed] = Recent()

    def add(self, report: frames.BroadcastFailed) -> bool:
        """Keep *report*. Return False if the same failure was reported before, else True."""
        key = report.stream, report.group
        with self._lock:
            if key in self._reports:
                return False
            self._reports[key] = report
            return True

    def of(self, stream: str) -> list[frames.BroadcastFailed]:
        with self._lock:
            return [report for report in self._reports.values() if report.stream == stream]


def reported(report: frames.BroadcastFailed, what: str) -> Exception:
    """Return the exception of the broadcast *what*, which failed as *report* says."""
    text = f"{what}: {report.src} reports: {report.text}"
    return PeerDiedError(text, peer=report.lost) if report.lost else RlinfActorsError(text)
