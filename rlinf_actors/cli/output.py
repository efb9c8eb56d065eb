"""Output of commands: tables for people, JSON for programs, colours on terminals only. Numbers on a command line."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from rlinf_actors.settings import journal_stream
from rlinf_actors.systemd.service_manager import marked, reads
from rlinf_actors.wire.protocol import printable

F = TypeVar("F", bound=Callable[..., Any])

_STYLES = {
    "ready": "green",
    "running": "green",
    "starting": "yellow",
    "suspect": "yellow",
    "stopping": "yellow",
    "draining": "yellow",
    "lost": "red",
    "gone": "red",
}

json_option: Callable[[F], F] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON with stable keys instead of a table."
)


def plain(text: object) -> str:
    """Return text with characters that control a terminal escaped; line ends stay."""
    return "\n".join(printable(line, len(line)) for line in str(text).split("\n"))


def show_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    """Print a table: drawn by rich on a terminal, plain aligned columns elsewhere.

    Args:
        headings: one per column.
        rows: cells; a cell that is a known state is coloured.
        empty: text for stderr if there are no rows.
    """
    if not rows:
        note(empty)
        return
    texts = [[plain(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(headings, texts)
        return
    widths = [max(len(row[column]) for row in (headings, *texts)) for column in range(len(headings))]
    for row in (headings, *texts):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair a line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{name.ljust(width)}  {plain(value)}")


def note(text: str) -> None:
    """Print a note for a person on stderr."""
    click.echo(plain(text), err=True)


def complain(text: str) -> None:
    """Print an error on stderr."""
    text = plain(text)
    if reads(2, journal_stream()):
        click.echo(marked(f"error: {text}", logging.ERROR), err=True)
        return
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo(click.style("error: ", fg="red", bold=True) + text, err=True, color=coloured)


def seconds(value: float) -> str:
    """Return a duration as people say it: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"


def mib(size: int) -> str:
    """Return a number of bytes in MiB or GiB, for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


def size(value: int) -> str:
    """Return a number of bytes in GiB, for people; "-" for 0."""
    return f"{value / 2**30:.0f} GiB" if value else "-"


def _draw(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console(highlight=False).print(table)  # rich follows NO_COLOR and TERM itself


class Amount(click.FloatRange):
    """A number in a range. NaN is in no range: every comparison with it is false, and the head drops such a message."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number
