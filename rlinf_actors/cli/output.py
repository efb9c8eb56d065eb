"""Output of commands: tables for people, JSON for programs, colours on terminals only. Also numbers in options.

Commands print by `echo`, because names and texts of members may have escape sequences; ruff refuses click.echo
elsewhere. `estop` has a function of its own (estop_targets.say), since importing click would delay it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from rlinf_actors.errors import UsageError
from rlinf_actors.last_line import last_line
from rlinf_actors.settings import journal_stream, takes_sequences
from rlinf_actors.shown import json_text, lines, printable
from rlinf_actors.systemd.service_manager import marked, reads

if TYPE_CHECKING:
    from rich.table import Table

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


def echo(text: object = "", *, lead: str = "", err: bool = False, nl: bool = True, color: bool | None = None) -> None:
    """Print *text* with escapes for control characters other than line ends and tabs. *lead*, which goes before it, may
    have colours.
    """
    last_line.clear()
    click.echo(lead + lines(str(text)), err=err, nl=nl, color=color)  # noqa: TID251 - the only place


def plain(text: object) -> str:
    """Return *text* for use within a line: control characters and line ends are escaped."""
    return printable(str(text), len(str(text)))


def json_line(data: object, indent: int | None = None) -> str:
    """Return *data* as JSON for a terminal or a program."""
    return json_text(json.dumps(data, indent=indent, ensure_ascii=False))


def show_json(data: object) -> None:
    echo(json_line(data, 2))


def show(as_json: bool, data: object, text: object) -> None:
    """Print *data* as JSON if *as_json* is true; otherwise print *text*."""
    if as_json:
        show_json(data)
    else:
        echo(text)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    """Print a table on stdout: drawn by rich if stdout is a terminal and the extra [cli] is installed, otherwise as
    plain aligned columns.

    On a terminal, a cell whose text is a known state is coloured. A terminal that is too narrow for whole words gets a
    line for each cell that has a value. If there are no rows, *empty* is printed on stderr instead of a table.
    """
    if not rows:
        note(empty)
        return
    texts = [[plain(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        fitting = _widths(headings, texts, columns)
        if fitting is None:
            for number, cells in enumerate(texts):
                if number:
                    echo()
                shown = {name: cell for name, cell in zip(headings, cells, strict=True) if cell not in ("", "-")}
                show_fields(shown or {headings[0]: cells[0]})
            return
        if _draw(headings, texts, fitting, columns):
            return
    widths = [max(len(row[column]) for row in (headings, *texts)) for column in range(len(headings))]
    for row in (headings, *texts):
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_fields(fields: Mapping[str, object]) -> None:
    """Print the fields on stdout, each with its name and its value; a list has a line for each of its values."""
    width = max(map(len, fields))
    for name, value in fields.items():
        for line in value if isinstance(value, list) else [value]:
            echo(folded(f"{name.ljust(width)}  {plain(line)}", width + 2))
            name = ""


def folded(line: str, indent: int) -> str:
    """Return a line for stdout. In a terminal it is folded between words, and what follows is indented. Elsewhere it
    stays one line, and so does one of a single word after the indent, such as a key.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if len(line) <= columns or columns < 2 * indent or " " not in line[indent:]:
        return line
    return textwrap.fill(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def note(text: str) -> None:
    echo(text, err=True)


def warn(warning: str) -> None:
    """Print *warning*, a text from a head's answer, on stderr. Print nothing if the text is empty."""
    if warning:
        note(f"warning: {warning}")


def complain(text: str) -> None:
    if reads(2, journal_stream()):
        echo(marked(f"error: {text}", logging.ERROR), err=True)
        return
    echo(text, lead=click.style("error: ", fg="red", bold=True), err=True, color=takes_sequences(sys.stderr))


def check_directory(path: Path) -> None:
    """Raise UsageError if the directory of the file *path*, which a command is to write, does not exist."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no directory {path.absolute().parent}")


yes_option: Callable[[F], F] = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def confirm(yes: bool, does: str, question: str, *, can_ask: bool = True) -> None:
    """Ask *question* in a terminal before a command ends something, unless the person has given --yes.

    *does* says what the command would end, such as "ends group a". *can_ask* is False for a command whose output is for
    a program.

    Raises:
        UsageError: there is no terminal in which to ask.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not (can_ask and sys.stdin.isatty()):
        raise UsageError(f"this {does}: confirm it by --yes")
    click.confirm(question, abort=True, err=True)


def mib(size: int) -> str:
    """Return a size, given in bytes, as text for people: in MiB, or from 1 GiB on in GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


def size(value: int) -> str:
    """Return a size, given in bytes, as text for people in whole GiB, or "-" for 0."""
    return f"{value / 2**30:.0f} GiB" if value else "-"


def _draw(headings: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], columns: int) -> bool:
    """Draw a table on stdout by rich. Return False, and draw nothing, if rich is not installed."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return False
    colours: Literal["auto"] | None = "auto" if takes_sequences(sys.stdout) else None  # else rich keeps bold headings
    console = Console(highlight=False, color_system=colours, width=columns)
    table = drawn_table(headings, rows)
    for column, width in zip(table.columns, widths, strict=False):
        column.width = width
    console.print(table)
    return True


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[int] | None:
    """Return the widths of a table's columns with which it fits into so many columns of a terminal and no word is
    broken; [] if the table fits anyway, None if words must be broken.
    """
    cells = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in cells]
    least = [max(map(len, " ".join(column).split()), default=0) for column in cells]
    room = columns - 2 * (len(widths) - 1)
    if sum(widths) <= room:
        return []
    if sum(least) > room:
        return None
    while sum(widths) > room:
        at = max(range(len(widths)), key=lambda n: widths[n] - least[n])
        widths[at] -= 1
    return widths


def drawn_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, cut: bool = False) -> Table:
    """Return a table for a console of rich. Each text is harmless already (`plain`). If *cut* is true, cells that are
    too long are cut, so that each row has one line; otherwise they are folded.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="ellipsis" if cut else "fold", no_wrap=cut)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table


class Amount(click.FloatRange):
    """The type of an option whose value is a number in a range. Infinity is refused, and NaN, which would pass the
    check of the range because every comparison with it is false.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


class Days(click.ParamType):  # type: ignore[type-arg]
    """The type of an option whose value is a time in days, hours or minutes, such as 90d, 12h or 30m; in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        units = {"d": 86400.0, "h": 3600.0, "m": 60.0}
        given = re.fullmatch(r"([0-9]{1,9})([dhm])", str(value))
        seconds = int(given[1]) * units[given[2]] if given else 0.0
        if not 0 < seconds <= MAX_DAYS * 86400:
            self.fail(f"{value!r} is no time such as 90d, 12h or 30m, of at most {MAX_DAYS} days", param, ctx)
        return seconds


MAX_DAYS = 36500
