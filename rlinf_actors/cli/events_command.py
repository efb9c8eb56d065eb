"""`rlinf-actors events`: print the event log of a cluster."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import click

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import echo, folded, json_line, note, plain
from rlinf_actors.cli.queries import Looking, find_head, head_option, observing
from rlinf_actors.cluster.event_stream import KINDS, EventCursor, patience
from rlinf_actors.errors import ClusterTimeoutError
from rlinf_actors.net.discovery import client_settings
from rlinf_actors.wire.client_messages import Events
from rlinf_actors.wire.event_values import ClusterEvent, event_dict
from rlinf_actors.wire.protocol import expected

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Since(NamedTuple):
    """The value of --since. Of the three fields at most one is not 0.

    Attributes:
        seq: number of an event.
        ago_s: seconds before now, by the head's clock.
        at: a time, in seconds since the epoch.
    """

    seq: int = 0
    ago_s: float = 0.0
    at: float = 0.0

    def begins(self, now: float) -> float:
        """Return the time of the oldest event to show. *now* is the head's time."""
        return now - self.ago_s if self.ago_s else self.at


def parse_since(context: click.Context, parameter: click.Parameter, value: str) -> Since:
    """Parse the option --since."""
    match = re.fullmatch(r"(\d+)([smhd]?)", value)
    if match is not None:
        number, unit = int(match[1]), match[2]
        return Since(ago_s=float(number * _UNITS[unit])) if unit else Since(number)
    clock = re.fullmatch(r"\d\d?:\d\d", value)
    try:
        if clock:
            return Since(at=last_time(value, datetime.now()).timestamp())
        return Since(at=datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        of_event = "the number of an event, nor " if "SEQ" in str(parameter.metavar) else ""
        raise click.BadParameter(
            f"{value!r} is neither {of_event}an age such as 30s, 10m, 2h or 1d, nor a time such as 14:30 or "
            "2026-05-17T14:30"
        ) from None


def last_time(clock: str, now: datetime) -> datetime:
    """Return the last time, not later than *now*, at which a clock showed *clock*, HH:MM.

    Raises:
        ValueError: no clock shows that.
    """
    hour, minute = map(int, clock.split(":"))
    today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return today if today <= now else today - timedelta(days=1)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Wait for new events, until interrupted.")
@click.option(
    "--since",
    callback=parse_since,
    default="0",
    metavar="SEQ|AGE|TIME",
    help="Only events after the event of this number, not older than an age (30s, 10m, 2h, 1d), or since a time "
    "(2026-05-17T14:30, or 14:30 for the last time that a clock showed it).",
)
@click.option(
    "--last",
    "-n",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Only the last events of those that the other options choose. With -f, the new events follow.",
)
@click.option("--group", metavar="NAME", help="Only events of groups of this name.", shell_complete=complete.groups)
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only events of this kind; may be repeated."
)
@click.option(
    "--node",
    metavar="NODE",
    help="Only events of this node and of workers on it: host name or id.",
    shell_complete=complete.nodes,
)
@click.option(
    "--job",
    "namespace",
    metavar="NAME",
    help="Only events of this job, of the nodes and of the head. Default: all.",
    shell_complete=complete.jobs,
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line, with stable keys.")
@head_option
def events(
    follow: bool,
    since: Since,
    last: int | None,
    group: str | None,
    kinds: tuple[str, ...],
    node: str | None,
    namespace: str | None,
    as_json: bool,
    head: str | None,
) -> None:
    """Show the event log: what joined, what ended, and why. Each event is one line; below the death of a worker are
    the last lines of its stderr. The head keeps the newest 10,000 events, also over its restarts; while it is away, -f
    waits for it and then goes on without a gap.
    """
    cursor = EventCursor(namespace, since.seq, kinds, group, node)
    past = None if last is None else deque[ClusterEvent](maxlen=last)  # until the end of the log is reached
    shown = False

    def show(answer: Events, found: list[ClusterEvent]) -> bool:
        nonlocal past, shown
        oldest = since.begins(answer.at)
        if found and found[0].kind == "events_missing" and answer.events and answer.events[0].at < oldest:
            del found[0]  # older ones than those that were asked for
        found = [event for event in found if event.at >= oldest]
        if past is not None:
            past.extend(found)
            if answer.more:
                return True
            found, past = list(past), None
        shown = shown or bool(found)
        for event in found:
            echo(json_line(event_dict(event)) if as_json else event_line(event))
        return follow or answer.more

    read_events(head, cursor, follow, show)
    if not shown and last != 0:
        note("no event matches these options")


def read_events(
    head: str | None,
    cursor: EventCursor,
    follow: bool,
    each: Callable[[Events, list[ClusterEvent]], bool],
    limit_s: float | None = None,
    look: Looking | None = None,
) -> None:
    """Read the event log of a head. Call *each* for every answer of the head, until *each* returns False. Blocks.

    Args:
        head: value of the option --head.
        cursor: position in the log, and filters.
        follow: True to wait for new events. If the head stops answering after its first answer, wait for the head too.
        each: takes an answer of the head, and the events in it that pass the filters.
        limit_s: seconds after which asyncio.TimeoutError is raised, None for no limit.
        look: says how far the wait for an event is, for progress on stderr; None if it is not shown.
    """
    settings = client_settings()
    endpoint = find_head(head, settings)

    async def read() -> None:
        async with observing(endpoint, settings, look=look) as client:
            reached = False
            while True:
                asked = cursor.request(follow)
                try:
                    if asked.wait_s and look is None:
                        reply = await client.listen(asked, patience(asked), again=True)
                    else:
                        reply = await client.request(asked, patience(asked))
                    answer = expected(reply, Events)
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
        folded(f"{at}  {event.seq:>5}  {plain(event.kind):<19}  {plain(event.text)}", 8),
        *(f"    {plain(line)}" for line in tail),
    ]
    return "\n".join(lines)
