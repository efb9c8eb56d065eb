"""The command `rlinf-actors top`: nodes, workers and channels with what they use, in a terminal or as one table.

`top.view` decides what is shown, `top.screen` has the terminal, and package `sampling` asks the head and the nodes, as
for the page of `serve`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from rlinf_actors.cli.output import Amount, json_option, note, plain, show_json, show_table
from rlinf_actors.cli.queries import OBSERVERS, find_head, head_option
from rlinf_actors.cli.top.view import SORT_KEYS, VIEWS, Choice, report, table
from rlinf_actors.errors import UsageError
from rlinf_actors.installed import install_extra
from rlinf_actors.net import discovery
from rlinf_actors.runtime.progress import Facts, showing
from rlinf_actors.sampling.sampler import Sampler
from rlinf_actors.settings import Settings

APART_S = 1.1
"""Seconds between the two rounds of a single table: a node collects its figures at most once in a second."""


@click.command()
@click.option("--once", is_flag=True, help="Print one table and end, as without a terminal. It takes a second.")
@click.option("--view", type=click.Choice(VIEWS), default="workers", show_default=True, help="What is shown first.")
@click.option(
    "--sort",
    type=click.Choice([*SORT_KEYS.values()], case_sensitive=False),
    default="name",
    show_default=True,
    help="The order of the rows.",
)
@click.option("--filter", "query", default="", metavar="WORDS", help="Only rows that have each of the words.")
@click.option(
    "--every", "every_s", type=Amount(min=1.0), default=2.0, show_default=True, metavar="SECONDS",
    help="Time between two polls of the head and the nodes.",
)  # fmt: skip
@head_option
@json_option
@click.pass_context
def top(
    context: click.Context,
    once: bool,
    view: str,
    sort: str,
    query: str,
    every_s: float,
    head: str | None,
    as_json: bool,
) -> None:
    """Show what nodes, workers and channels use and do, until q is pressed. It only asks.

    Keys: 1, 2, 3 or Tab choose workers, nodes or channels; c, m, g, d and n sort by CPU, memory, GPU, depth and name; /
    filters; arrows scroll; q quits. CPU of a worker is in percent of one processor, that of a node in percent of all.
    """
    if as_json and any(context.get_parameter_source(name) != _DEFAULT for name in ("view", "sort", "query")):
        raise UsageError("--json prints everything: leave out --view, --sort and --filter")
    settings = discovery.client_settings()
    endpoint = find_head(head, settings)
    choice = Choice(view, sort, query)
    if as_json or once or not _can_draw():
        asyncio.run(_once(endpoint, settings, choice, as_json))
    else:
        asyncio.run(_live(endpoint, settings, choice, every_s))


_DEFAULT = click.core.ParameterSource.DEFAULT


def _can_draw() -> bool:
    """Return True if there is a terminal to draw on and to read keys from."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        import rich.live  # noqa: F401
    except ModuleNotFoundError:
        note(f"one table, because rich is not installed: run '{install_extra('cli')}'")
        return False
    return True


@asynccontextmanager
async def _sampling(endpoint: str, settings: Settings, every_s: float) -> AsyncIterator[Sampler]:
    """Yield a Sampler whose Board has a first sample. Raise what the Sampler raises if the head does not answer."""
    from rlinf_actors.net.zmq_network import ZmqNetwork

    security = discovery.security_toward(endpoint, settings, *OBSERVERS)
    network = ZmqNetwork(asyncio.get_running_loop(), security)
    try:
        sampler = Sampler(network, endpoint, every_s)
        try:
            async with showing(_first_answers, ""):
                sampler.board.take(await sampler.sample())
            yield sampler
        finally:
            sampler.close()
    finally:
        network.close()


async def _first_answers(_missing: bool) -> Facts:
    return Facts("waiting for the first figures of the nodes")


async def _once(endpoint: str, settings: Settings, choice: Choice, as_json: bool) -> None:
    async with _sampling(endpoint, settings, APART_S) as sampler:
        await asyncio.sleep(APART_S)  # rates are differences
        sampler.board.take(await sampler.sample())
        board = sampler.board
    if as_json:
        show_json(report(board, endpoint))
        return
    for node in board.nodes:
        if node.fault:
            note(f"node {plain(node.name)}: {plain(node.fault)}")
    found = table(board, choice)
    show_table(found.headings, found.rows, found.empty)


async def _live(endpoint: str, settings: Settings, choice: Choice, every_s: float) -> None:
    from rlinf_actors.cli.top.screen import Screen

    async with _sampling(endpoint, settings, every_s) as sampler:
        await Screen(sampler, choice).run()
