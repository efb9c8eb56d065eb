"""`rlinf-actors events`: print the event log of a cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec

from rlinf_actors.cli.output import echo, json_line, note, plain
from rlinf_actors.cli.queries import expected, find_head, head_option, observing
from rlinf_actors.cluster.event_stream import KINDS, EventCursor, patience
from rlinf_actors.errors import ClusterTimeoutError
from rlinf_actors.net.discovery import client_settings
from rlinf_actors.wire.client_messages import Events
from rlinf_actors.wire.values import ClusterEvent

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _since(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, float]:
    """Parse the option --since. Return (number of an event, 0.0) for a plain number such as 12, and (0, seconds before
    now) for a time such as 10m.
    """
    match = re.fullmatch(r"(\d+)([smhd]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is neither the number of an event nor a time such as 30s, 10m, 2h or 1d")
    number, unit = int(match[1]), match[2]
    return (0, float(number * _UNITS[unit])) if unit else (number, 0.0)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Wait for new events, until interrupted.")
@click.option(
    "--since",
    callback=_since,
    default="0",
    metavar="SEQ|TIME",
    help="Only events after the event of this number, or not older than 30s, 10m, 2h or 1d.",
)
@click.option("--group", metavar="NAME", help="Only events of groups of this name.")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only events of this kind; may be repeated."
)
@click.option("--namespace", metavar="NS", help="Only events of this namespace and of the nodes. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line, with stable keys.")
@head_option
def events(
    follow: bool,
    since: tuple[int, float],
    group: str | None,
    kinds: tuple[str, ...],
    namespace: str | None,
    as_json: bool,
    head: str | None,
) -> None:
    """Show the event log: what joined, what ended, and why. Each event is one line. The head keeps only the newest
    events.
    """
    cursor = EventCursor(namespace, since[0], kinds, group)

    def show(answer: Events, found: list[ClusterEvent]) -> bool:
        for event in found:
            if not since[1] or event.at >= answer.at - since[1]:
                echo(json_line(event_dict(event)) if as_json else event_line(event))
        return follow or answer.more

    read_events(head, cursor, follow, show)


def read_events(
    head: str | None,
    cursor: EventCursor,
    follow: bool,
    each: Callable[[Events, list[ClusterEvent]], bool],
    limit_s: float | None = None,
) -> None:
    """Read the event log of a head. Call *each* for every answer of the head, until *each* returns False. Blocks.

    Args:
        head: value of the option --head.
        cursor: position in the log, and filters.
        follow: True to wait for new events. If the head stops answering after its first answer, wait for the head too.
        each: takes an answer of the head, and the events in it that pass the filters.
        limit_s: seconds after which asyncio.TimeoutError is raised, None for no limit.
    """
    settings = client_settings()
    endpoint = find_head(head, settings)

    async def read() -> None:
        async with observing(endpoint, settings) as client:
            reached = False
            while True:
                asked = cursor.request(follow)
                try:
                    answer = expected(await client.request(asked, patience(asked)), Events)
                except ClusterTimeoutError as error:
                    if not (follow and reached):
                        raise
                    note(f"{error}; waiting for it")
                    continue
                reached = True
                if not each(answer, cursor.take(answer)):
                    return

    asyncio.run(asyncio.wait_for(read(), limit_s))


def event_line(event: ClusterEvent) -> str:
    at = datetime.fromtimestamp(event.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    tail = event.exit.stderr_tail if event.kind == "worker_died" and event.exit is not None else []
    lines = [
        f"{at}  {event.seq:>5}  {plain(event.kind):<19}  {plain(event.text)}",
        *(f"    {plain(line)}" for line in tail),
    ]
    return "\n".join(lines)


def event_dict(event: ClusterEvent) -> dict[str, Any]:
    """Return the JSON object of an event, as `rlinf-actors events --json` prints it. Its keys are stable; new keys may
    be added. ``at`` is in seconds since 1970.
    """
    shown: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    shown["exit"] = None if event.exit is None else msgspec.structs.asdict(event.exit)
    return shown
