"""Pictures of the documentation: how they are written, and the words in them, which tests compare with the code's.

RLINF_ACTORS_TEST_PICTURES=1 makes tests write the pictures that they check. A picture of a page is a PNG with its words
in a text chunk, and one of a terminal an SVG. So a picture that is out of date fails a test without a browser.
"""

from __future__ import annotations

import html
import importlib
import io
import os
import re
import struct
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

DOCS = Path(__file__).resolve().parents[1] / "docs"
MAKES = bool(os.environ.get("RLINF_ACTORS_TEST_PICTURES"))
"""True if the pictures are written anew."""
MOST_BYTES = 150_000
AGAIN = (
    "a picture shows other words than the code: run the test with RLINF_ACTORS_TEST_PICTURES=1, and look at the picture"
)
_WORDS = b"Words"
_VARIES = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}|\d\d:\d\d:\d\d|\d\d [A-Z][a-z]{2} \d\d:\d\d"), "TIME"),
    (re.compile(r"\b\d+\.\d+\.\d+(\.?[a-z]+\d*)?\b"), "VERSION"),
)


def lasting(text: str) -> str:
    """Return *text* without what differs from day to day: times, and versions."""
    for pattern, word in _VARIES:
        text = pattern.sub(word, text)
    return text


# --- pages ---


class _Words(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._hidden = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("head", "script", "style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("head", "script", "style", "title")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.found.append(" ".join(data.split()))


def words(page: str) -> str:
    """Return the words of an HTML page, one text a line."""
    return lasting("\n".join(_Words(page).found))


def write_png(path: Path, shot: bytes, page: str) -> None:
    """Write a screenshot of *page* with at most 256 colours, and with its words. Needs Pillow."""
    image, info = importlib.import_module("PIL.Image"), importlib.import_module("PIL.PngImagePlugin").PngInfo()
    info.add_text(_WORDS.decode(), words(page).encode("utf-8").decode("latin-1"), zip=True)
    small = image.open(io.BytesIO(shot)).convert("RGB").quantize(256, dither=image.Dither.NONE)
    small.save(path, optimize=True, pnginfo=info)


def words_of_png(path: Path) -> str:
    """Return the words that `write_png` has put into a picture."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        if kind == b"zTXt" and body.startswith(_WORDS + b"\0"):
            return zlib.decompress(body[len(_WORDS) + 2 :]).decode()
        at += size + 12
    raise AssertionError(f"{path.name} has no words: make it anew")


# --- terminals ---

_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; \
line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""Rich's own form without fonts from elsewhere."""
_TEXT = re.compile(r'<text class="(\S+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)" [^>]*>(.*?)</text>')
_SHOWN = re.compile(r'<text class="\S+" x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+">(.*?)</text>')
_BAR = re.compile(r'<rect class="\S+" x="([\d.]+)" [^>]*data-line="([\d.]+)" data-text="(.*?)"/>')
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CELL, _LINE, _ASCENT = 12.2, 24.4, 20.0  # of rich: width and height of a character, and its base line


def terminal_svg(shown: RenderableType, columns: int, title: str, name: str) -> str:
    """Return the picture of what a terminal shows. *name* begins the names of its styles."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown)
    return _TEXT.sub(_solid, console.export_svg(title=title, code_format=_FORMAT, unique_id=name))


def _solid(text: re.Match[str]) -> str:
    """Return a text of the picture with bars in place of its block characters, between which fonts leave gaps."""
    style, x, y, _, content = text.groups()
    letters = html.unescape(content)
    parts = []
    for run in re.finditer(f"([{_BLOCKS[1:]}])\\1*|[^{_BLOCKS[1:]}]+", letters):
        left, width = float(x) + run.start() * _CELL, len(run[0]) * _CELL
        if run[1]:
            height = _BLOCKS.index(run[1]) / 8 * _LINE
            top = float(y) - _ASCENT + _LINE - height
            size = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height + 0.8:g}"'
            parts.append(f'<rect class="{style}" {size} data-line="{y}" data-text="{run[0]}"/>')
        elif run[0].strip("\xa0"):
            escaped = html.escape(run[0]).replace("\xa0", "&#160;")
            parts.append(f'<text class="{style}" x="{left:g}" y="{y}" textLength="{width:g}">{escaped}</text>')
    return "".join(parts)


def lines_of_svg(picture: str) -> list[str]:
    """Return the lines of the terminal that a picture shows."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, content in _SHOWN.findall(picture):
        rows.setdefault(float(y), []).append((float(x), html.unescape(content)))
    for x, y, content in _BAR.findall(picture):
        rows.setdefault(float(y), []).append((float(x), content))
    found = []
    for _, texts in sorted(rows.items()):
        line = ""
        for x, text in sorted(texts):
            line = line.ljust(round(x / _CELL)) + text
        found.append(line.replace("\xa0", " ").rstrip())
    return found


def lines_of(shown: RenderableType, columns: int) -> list[str]:
    """Return the lines that a terminal shows."""
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    with console.capture() as caught:
        console.print(shown)
    return [line.rstrip() for line in caught.get().splitlines()]


def same(found: Iterable[str], expected: Iterable[str]) -> bool:
    """True if both have the same words in their lines, apart from times, versions and empty lines."""
    one, other = ([lasting(" ".join(line.split())) for line in lines if line.strip()] for lines in (found, expected))
    return one == other
