"""The commands `rlinf-actors channel list|show`: what channels hold, as their hosts see it. No item is looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import json_option, note, show_json, show_table
from rlinf_actors.cli.queries import head_option, observing, status_of
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.readable import byte_count
from rlinf_actors.net import discovery
from rlinf_actors.plurals import counted
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.figure_values import ChannelFigures, FigureQuestion, NodeFigures
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.values import CHANNEL_GROUPS

ANSWER_S = 12.0

job_option = complete.job_option("Only channels of this job.")


@click.group()
def channel() -> None:
    """List the channels, or show one: items, bytes, waiting producers and consumers."""


@channel.command("list")
@job_option
@head_option
@json_option
def list_channels(job: str, head: str | None, as_json: bool) -> None:
    """List the channels: one row for each process that holds one. A distributed channel has a process on each node."""
    endpoint, status = status_of(head)
    rows = channel_rows(endpoint, status, job)
    if as_json:
        show_json(rows)
        return
    show_table(
        ("CHANNEL", "JOB", "HOST", "ITEMS", "BYTES", "KEYS", "OUT", "PUTS WAIT", "GETS WAIT", "STATE"),
        [_row(row) for row in rows],
        "no channel is open",
    )


@channel.command()
@click.argument("name")
@job_option
@head_option
@json_option
def show(name: str, job: str, head: str | None, as_json: bool) -> None:
    """Show a channel: items, bytes and waiting processes of its 32 fullest keys. A distributed channel has them for
    each of its processes.
    """
    endpoint, status = status_of(head)
    every = channel_rows(endpoint, status, job)
    rows = [row for row in every if row["name"] == name]
    if not rows:
        known = ", ".join(sorted({f"{row['name']} ({row['job']})" for row in every})) or "none at all"
        raise UsageError(f"there is no channel {name!r}; there are: {known}")
    if len({row["job"] for row in rows}) > 1:
        raise UsageError(f"several jobs have a channel {name!r}: say which by --job")
    if as_json:
        show_json(rows)
        return
    for row in rows:
        limits = ", ".join(
            [f"at most {counted(row['max_items'], 'item')} a key"] * bool(row["max_items"])
            + [f"at most {byte_count(row['max_bytes'])}"] * bool(row["max_bytes"])
        )
        held = f"{counted(row['items'], 'item')}, {byte_count(row['size'])} ({limits or 'no limit'})"
        note(f"{name} of job {row['job']} on {row['host']}: {held}")
        if row["fault"]:
            note(f"the process that holds it does not answer: {row['fault']}")
    show_table(
        ("KEY", "HOST", "ITEMS", "BYTES", "OUT", "PUTS WAIT", "GETS WAIT", "UNDELIVERABLE", "WHO WAITS"),
        [
            (
                key["key"],
                row["host"],
                key["items"],
                byte_count(key["size"]) if key["size"] >= 0 else "-",
                key["out"],
                key["puts_waiting"],
                key["gets_waiting"],
                key["undeliverable"],
                ", ".join([*key["producers"], *key["consumers"]]) or "-",
            )
            for row in rows
            for key in row["by_key"]
        ],
        "no key is in use",
    )


def channel_rows(endpoint: str, status: Status, job: str) -> list[dict[str, Any]]:
    """Return the JSON objects of the hosts of all channels of *job*, or of all jobs for "". Blocks."""
    nodes = {node.rank: node.report for node in status.nodes if node.rank >= 0}
    hosts = [
        (group, worker)
        for group in status.groups
        if group.name.startswith(CHANNEL_GROUPS) and job in ("", group.namespace)
        for worker in group.workers
        if worker.state != "gone"
    ]
    asked = sorted({(nodes[one.node_rank].node_id, group.namespace) for group, one in hosts if one.node_rank in nodes})
    found = asyncio.run(_ask(endpoint, asked)) if asked else {}
    rows = []
    for group, worker in sorted(hosts, key=lambda one: (one[0].namespace, one[0].name, one[1].rank)):
        figures, fault = found.get(worker.id, (None, "its node does not answer"))
        row = figures_dict(figures or ChannelFigures())
        for key in row["by_key"]:
            for part in ("producers", "consumers"):
                key[part] = [waiter_name(status, one) for one in key[part]]
        node = nodes.get(worker.node_rank)
        host = node.hostname if node is not None else worker.node_ip
        name = group.name.removeprefix(CHANNEL_GROUPS)
        rows.append({"name": name, "job": group.namespace, "host": host, "worker": worker.rank, "fault": fault, **row})
    return rows


def figures_dict(figures: ChannelFigures) -> dict[str, Any]:
    keys = [msgspec.structs.asdict(key) for key in figures.by_key]
    return {**msgspec.structs.asdict(figures), "by_key": keys}


async def _ask(endpoint: str, asked: list[tuple[str, str]]) -> dict[str, tuple[ChannelFigures | None, str]]:
    found: dict[str, tuple[ChannelFigures | None, str]] = {}
    async with observing(endpoint, discovery.client_settings()) as client:
        for node_id, job in asked:
            try:
                answer = await client.request(AskNode(node_id, FigureQuestion(job)), ANSWER_S)
            except RlinfActorsError as error:
                note(f"node {node_id}: {error}")
                continue
            for one in answer_of(answer, NodeFigures).workers:
                found[one.id] = one.channel, one.fault or ("" if one.channel else "it does not say what it holds")
    return found


def waiter_name(status: Status, waiter: str) -> str:
    """Return the name of a process that waits, for people: "actor:0", or "ann's train.py (pid 4242 on gpu-1)".

    *waiter* is the id of a worker, or of a child member, which begins with its worker's; or a driver's incarnation.
    """
    for driver in status.drivers:
        if driver.incarnation == waiter:
            where = f" on {driver.program.hostname}" if driver.program.hostname else ""
            return f"{str(driver.program) or 'a driver'} (pid {driver.pid}{where})"
    for group in status.groups:
        for worker in group.workers:
            if waiter == worker.id or waiter.startswith(f"{worker.id}_"):
                return f"{'a child of ' * (waiter != worker.id)}{group.name}:{worker.rank}"
    return f"a process that has left the cluster ({waiter[:8]})"


def _row(row: dict[str, Any]) -> tuple[Any, ...]:
    state = row["fault"] or ("closed" if row["closed"] else "open")
    waiting = row["puts_waiting"], row["gets_waiting"]
    return (
        row["name"],
        row["job"],
        row["host"],
        row["items"],
        byte_count(row["size"]),
        row["keys"],
        row["out"],
        *waiting,
        state,
    )
