"""What a check of `rlinf-actors doctor` is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F")

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `rlinf-actors doctor` prints each result on a line of its report."""

    check: str
    status: str  # PASS, WARN or FAIL
    text: str  # what was found
    fix: str = ""  # what to do, "" if nothing is wrong
    nodes: tuple[str, ...] = ()  # the nodes that it is about, none for this machine or the whole cluster


@dataclass(frozen=True)
class Check(Generic[F]):
    """A row of a table of checks. docs/reference/doctor.md is made from these rows: the docstring of `run` says what
    the check looks at.
    """

    names: tuple[str, ...]  # of the findings
    run: Callable[[F], list[Finding]]
