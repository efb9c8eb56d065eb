"""`rlinf-actors groups`: every group of workers, and ending one by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from rlinf_actors.cli.amounts import Amount
from rlinf_actors.cli.output import json_option, note, show_json, show_table
from rlinf_actors.cli.session import ask_head, head_option, status_of
from rlinf_actors.errors import UsageError
from rlinf_actors.security.thisuser import who
from rlinf_actors.wire.clients import Done
from rlinf_actors.wire.operators import EndGroup
from rlinf_actors.wire.values import GroupState

ANSWER_S = 30.0
"""How long beyond its grace the end of a group may take."""
ENDS_GROUPS = 7
"""The first protocol whose heads end a group for a person."""


@click.group(invoke_without_command=True)
@head_option
@json_option
@click.pass_context
def groups(context: click.Context, head: str | None, as_json: bool) -> None:
    """List the groups: name, class, state, where their workers are. A detached group has no driver that ends it."""
    if context.invoked_subcommand is not None:
        context.obj = head
        return
    _, found = status_of(head)
    rows = [group_dict(group) for group in found.groups]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("NAMESPACE", "GROUP", "CLASS", "STATE", "WORKERS", "NODES"),
        [
            (
                row["namespace"],
                row["name"],
                row["class"],
                row["state"] + (", detached" if row["detached"] else ""),
                ", ".join(f"{count} {state}" for state, count in row["workers"].items()),
                ",".join(map(str, row["node_ranks"])),
            )
            for row in rows
        ],
        "no group is running",
    )


def group_dict(group: GroupState) -> dict[str, Any]:
    """A line of `groups --json`; keys are stable, new ones may be added."""
    return {
        "namespace": group.namespace,
        "name": group.name,
        "class": group.cls,
        "state": group.state,
        "world_size": len(group.workers),
        "workers": dict(Counter(worker.state for worker in group.workers)),
        "node_ranks": sorted({worker.node_rank for worker in group.workers}),
        "owner": group.owner,
        "detached": group.detached,
    }


@groups.command()
@click.argument("name")
@click.option("--namespace", metavar="NS", help="Its namespace, where groups of several have that name.")
@click.option(
    "--grace",
    "grace_s",
    type=Amount(min=0.0),
    default=5.0,
    metavar="SECONDS",
    help="Between SIGTERM and SIGKILL (default 5).",
)
@click.option("--reason", default="", metavar="TEXT", help="Why; whoever calls the group is told.")
@head_option
@click.pass_obj
def stop(
    group_head: str | None, name: str, namespace: str | None, grace_s: float, reason: str, head: str | None
) -> None:
    """End a group, detached or not, and wait until its workers are gone."""
    endpoint, status = status_of(head or group_head)
    if status.protocol < ENDS_GROUPS:
        raise UsageError(f"the head there is rlinf-actors {status.version} and ends no group by name: upgrade it")
    chosen = find_group(status.groups, name, namespace)
    ask_head(endpoint, EndGroup(chosen.namespace, name, grace_s, who(), reason), Done, grace_s + ANSWER_S)
    note(f"group {name} of namespace {chosen.namespace} has ended")


def find_group(groups: Sequence[GroupState], name: str, namespace: str | None) -> GroupState:
    """Return the group that a person means.

    Raises:
        UsageError: there is none of that name, or there are several.
    """
    found = [group for group in groups if group.name == name and namespace in (None, group.namespace)]
    if len(found) == 1:
        return found[0]
    if found:
        spaces = ", ".join(sorted(group.namespace for group in found))
        raise UsageError(f"{len(found)} groups are called {name!r}: say which by --namespace ({spaces})")
    where = "" if namespace is None else f" in namespace {namespace!r}"
    known = ", ".join(sorted(f"{group.name} ({group.namespace})" for group in groups)) or "none at all"
    raise UsageError(f"there is no group {name!r}{where}; there are: {known}")
