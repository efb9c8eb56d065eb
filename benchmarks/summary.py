"""Compute medians, ratios and verdicts from samples. Pure. Verdicts use ratios, never absolute times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.model import Case, Figure
from benchmarks.runner import Session

SCHEMA = 2


@dataclass(frozen=True)
class Row:
    """One figure of all backends.

    Attributes:
        ours, raw, prototype, ray: medians, None if not measured.
        ours_raw, ours_prototype, ray_ours: ratios of these medians.
        reach_limit, reach_prototype, reach_ray: targets of the ratios; see `Figure`.
        reference: the raw figure on the reference machine, None if it is unknown.
        reached: True if all targets are met whose ratios were measured; None if there is none. A missing Ray alone
            leaves the other targets.
    """

    case: str
    name: str
    title: str
    unit: str
    better: str
    ours: float | None
    raw: float | None
    prototype: float | None
    ray: float | None
    ours_raw: float | None
    ours_prototype: float | None
    ray_ours: float | None
    reach_limit: float | None
    reach_prototype: float | None
    reach_ray: float | None
    reference: float | None
    reached: bool | None


def samples(sessions: Sequence[Session], case: str, backend: str, figure: str) -> list[float]:
    """Return the values of a figure from all repetitions, in the order of measurement."""
    return [
        session.figures[figure]
        for session in sessions
        if session.case == case and session.backend == backend and figure in session.figures
    ]


def row(case: Case, figure: Figure, sessions: Sequence[Session]) -> Row:
    """Return the row of one figure, over all sessions."""

    def median(backend: str, name: str) -> float | None:
        values = samples(sessions, case.name, backend, name)
        return statistics.median(values) if values else None

    ours, ray = median("ours", figure.name), median("ray", figure.name)
    raw, prototype = median("zmq", figure.limit_name), median("prototype", figure.name)
    ours_raw, ours_prototype, ray_ours = _ratio(ours, raw), _ratio(ours, prototype), _ratio(ray, ours)
    lower = figure.better == "lower"
    verdicts = [
        _meets(ratio, reach, at_most)
        for ratio, reach, at_most in (
            (ours_raw, figure.reach_limit, lower),
            (ours_prototype, figure.reach_prototype, lower),
            (ray_ours, figure.reach_ray, not lower),
        )
        if reach is not None and ratio is not None
    ]
    return Row(
        case.name, figure.name, figure.title, figure.unit, figure.better, ours, raw, prototype, ray, ours_raw,
        ours_prototype, ray_ours, figure.reach_limit, figure.reach_prototype, figure.reach_ray, figure.reference,
        all(verdicts) if verdicts else None,
    )  # fmt: skip


def rows(cases: Sequence[Case], sessions: Sequence[Session]) -> list[Row]:
    """Return the rows of the table, without figures that no backend measured."""
    every = [row(case, figure, sessions) for case in cases for figure in case.figures]
    return [line for line in every if not line.ours is line.raw is line.prototype is line.ray is None]


def as_json(
    cases: Sequence[Case],
    sessions: Sequence[Session],
    repetitions: int,
    backends: Sequence[str],
    machine: dict[str, object],
    command: str,
) -> dict[str, object]:
    """Return the whole run: every sample, and the rows of the table."""
    return {
        "schema": SCHEMA,
        "command": command,
        "machine": machine,
        "repetitions": repetitions,
        "backends": list(backends),
        "rows": [asdict(line) for line in rows(cases, sessions)],
        "sessions": [asdict(session) for session in sessions],
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _meets(value: float, wanted: float, at_most: bool) -> bool:
    return value <= wanted if at_most else value >= wanted
