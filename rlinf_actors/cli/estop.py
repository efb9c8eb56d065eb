"""`rlinf-actors estop`: stop all robots now."""

from __future__ import annotations

from typing import Any

import click

from rlinf_actors.cli.output import json_option, note, show_json, show_table
from rlinf_actors.cli.session import ask_head, head_option, who
from rlinf_actors.wire.operators import EStop, EStopped


@click.command()
@click.option("--reason", default="", metavar="TEXT", help="Why; those whose workers end are told.")
@click.option("--namespace", metavar="NS", help="Only the robots of this namespace. Default: every robot.")
@click.option("--release", is_flag=True, help="Lift the stop again: groups that use robots may be launched.")
@head_option
@json_option
def estop(reason: str, namespace: str | None, release: bool, head: str | None, as_json: bool) -> None:
    """Stop all robots: their workers run on_lease_lost and end. Until --release no group that uses robots starts.

    It is no replacement for the robot's own emergency stop: it needs this machine, the network and the head.
    """
    _, found = ask_head(head, EStop(who(), reason, namespace, release), EStopped)
    if as_json:
        show_json(summary(found))
        return
    if not release:
        show_table(
            ("WORKER", "NAMESPACE", "ROBOTS", "NODE", "TOLD"),
            [(hit.worker, hit.namespace, ", ".join(hit.robots), hit.node, _told(hit.reached)) for hit in found.hits],
            "no robot worker is running",
        )
    for line in found.stopped:
        note(f"in force: {line}")
    if not found.stopped:
        note("no emergency stop is in force")
    if found.warning:
        note(f"warning: {found.warning}")


def summary(found: EStopped) -> dict[str, Any]:
    """What `estop --json` prints; keys are stable, new ones may be added."""
    return {
        "hits": [
            {
                "worker": hit.worker,
                "namespace": hit.namespace,
                "robots": hit.robots,
                "node": hit.node,
                "reached": hit.reached,
            }
            for hit in found.hits
        ],
        "in_force": found.stopped,
        "warning": found.warning,
    }


def _told(reached: bool) -> str:
    return "yes" if reached else "no: its node is silent; its lease ends by itself"
