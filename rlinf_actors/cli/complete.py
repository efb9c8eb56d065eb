"""Completes names of groups, workers, jobs and nodes for a shell (`rlinf-actors completion`), from a running head.

A shell waits for the answer, and shows what is written. So a head that does not answer soon, or that cannot be found,
gives no names, and nothing is said about it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from rlinf_actors.cli.queries import fetch_status
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net import discovery
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.values import GroupState

PATIENCE_S = 1.0
"""Seconds for which a shell waits for a head."""
_WORD = re.compile(r"[A-Za-z0-9_.@+:-]+")
"""Names that need no quotes in a shell. Others are not completed."""

Command = TypeVar("Command", bound=Callable[..., Any])
Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _completion(names: Callable[[Status, str, str], Iterable[str]]) -> Completion:
    """Return a `shell_complete` of click by *names*: it gets the state of the cluster, the value of --job, and what is
    typed so far.
    """

    def complete(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
        status = _status(context.params.get("head"))
        job = str(context.params.get("job") or context.params.get("namespace") or "")
        found = {*names(status, job, typed)} if status is not None else ()
        return sorted(name for name in found if name.startswith(typed) and _WORD.fullmatch(name))

    return complete


def _status(head: str | None) -> Status | None:
    """Return the state of the cluster, None if no head answers within PATIENCE_S."""
    found: list[Status] = []

    def ask() -> None:
        try:
            settings = discovery.client_settings()
            found.append(fetch_status(discovery.find_head(head, settings)[0], settings))
        except (RlinfActorsError, OSError):
            pass  # no head: no names

    # a thread: the search for a host's address cannot be ended
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return found[0] if found else None


def _groups_of(status: Status, job: str) -> list[GroupState]:
    return [group for group in status.groups if job in ("", group.namespace)]


def _workers_of(status: Status, job: str) -> list[str]:
    return [f"{group.name}:{worker.rank}" for group in _groups_of(status, job) for worker in group.workers]


groups = _completion(lambda status, job, _: (group.name for group in _groups_of(status, job)))
workers = _completion(lambda status, job, _: _workers_of(status, job))
targets = _completion(
    lambda status, job, typed: (
        _workers_of(status, job) if ":" in typed else [group.name for group in _groups_of(status, job)]
    )
)
"""A group, or after a colon one of its workers."""
jobs = _completion(
    lambda status, _, __: {*(one.namespace for one in status.groups), *(one.namespace for one in status.drivers)}
)
nodes = _completion(lambda status, _, __: (node.report.hostname for node in status.nodes))


def job_option(text: str) -> Callable[[Command], Command]:
    """Return the option --job NAME of a verb, with its help *text*; "" if it is not given."""
    return click.option("--job", "job", default="", metavar="NAME", help=text, shell_complete=jobs)
