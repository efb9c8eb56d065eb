"""What the workers of the job do, for the errors of waits whose time is over; `wait_watch` sets it up in a driver."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import CallTimeoutError

if TYPE_CHECKING:
    from rlinf_actors.runtime.future import Future
    from rlinf_actors.runtime.late_report import LateReport

job_report: Callable[[float], LateReport | None] | None = None
"""Asks the workers, for a wait that had so many seconds. None if this process is no driver."""


def job_text(timeout: float) -> str:
    """Return what the workers of the job do, to be added to the error of a wait. Blocks for less than a second.

    *timeout* is the time that the wait had, in seconds. The text is "" if they are not asked.
    """
    report = None if job_report is None else job_report(timeout)
    if report is None:
        return ""
    report._block_until_done(None)  # it ends by itself
    return _text(report)


def explain(future: Future[Any], error: BaseException) -> None:
    """Add the facts to *error*, the outcome of *future*, if it says that the time of the operation is over. Once."""
    limit_s = _limit(future, error)
    if limit_s:
        error.args = (f"{error}{job_text(limit_s)}",)


def await_explain(future: Future[Any], error: BaseException) -> Generator[Any, None, None]:
    """The same for a coroutine: does not block its event loop."""
    limit_s = _limit(future, error)
    report = job_report(limit_s) if limit_s and job_report is not None else None
    if report is not None:
        yield from report.__await__()
        error.args = (f"{error}{_text(report)}",)


def _limit(future: Future[Any], error: BaseException) -> float:
    limit_s: float = getattr(future, "limit_s", 0.0)
    if not limit_s or type(error) is not CallTimeoutError or error is not future._error:
        return 0.0
    future.limit_s = 0.0  # type: ignore[attr-defined]
    return limit_s


def _text(report: LateReport) -> str:
    text = report.describe()
    return f"; {text}" if text else ""
