"""Text of other processes, made harmless for a terminal or a log. Pure.

An escape sequence in a name, an error or a line of output could clear the screen, hide or forge lines, set the window's
title, or make some terminals type. `printable` is for text within a line, `lines` for text of several lines, and
`output` for what workers print. All others, and `wire.protocol`, take them from here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

TEXT_CHARS = 1000
"""Largest number of characters of a line in the event log, and of a person's reason."""

_SGR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
"""The sequences that only set colours and weights (Select Graphic Rendition)."""
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"  # control, and directions
)
RESET = "\x1b[0m"
HTML_ROWS = 100
"""Most rows of a table in a notebook."""


def printable(text: str, limit: int = TEXT_CHARS) -> str:
    """Return text from another process for use within a line.

    Control characters and line breaks are escaped, and the text is cut to *limit* characters.
    """
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in cut)


def lines(text: str) -> str:
    """Return text of another process, such as a traceback, with its line ends and tabs, and escapes for the rest."""
    return "\n".join(_UNSAFE.sub(_escaped, line) for line in text.split("\n")) if _UNSAFE.search(text) else text


def output(text: str) -> str:
    """Return a line of a worker's output: with its tabs and colours, and escapes for all other control characters.

    Colours end with the line, so that they do not reach the lines of others.
    """
    if text.isprintable() or not _UNSAFE.search(text):
        return text
    found, end = [], 0
    for colour in _SGR.finditer(text):
        found += [_UNSAFE.sub(_escaped, text[end : colour.start()]), colour.group()]
        end = colour.end()
    rest = _UNSAFE.sub(_escaped, text[end:])
    return "".join([*found, rest, RESET]) if end else rest


def bar(text: str) -> str:
    """Return a state of a worker's progress bar, without colours, for use within a line."""
    return printable(_SGR.sub("", text), len(text) + 1)


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a notebook, as HTML with escaped text. Rows beyond HTML_ROWS are only counted. Without
    *headings*, the first cell of each row is its heading.
    """
    found = list(rows)
    cells = "".join(f"<th>{_cell(heading)}</th>" for heading in headings)
    first = "td" if headings else "th"
    body = "".join(
        f"<tr><{first}>{_cell(row[0])}</{first}>{''.join(f'<td>{_cell(one)}</td>' for one in row[1:])}</tr>"
        for row in found[:HTML_ROWS]
    )
    more = f"<p>and {len(found) - HTML_ROWS} more</p>" if len(found) > HTML_ROWS else ""
    head = f"<thead><tr>{cells}</tr></thead>" if headings else ""
    table = f"<table>{head}<tbody>{body}</tbody></table>" if found else ""
    return f"<div><strong>{_cell(title)}</strong>{table}{more}</div>"


def _cell(value: object) -> str:
    return html.escape(printable(str(value)))


def json_text(text: str) -> str:
    """Return JSON with escapes of JSON for the characters that terminals act on."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    return _escape(found[0])


def _escape(char: str) -> str:
    return ascii(char)[1:-1]
