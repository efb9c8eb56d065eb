"""The picture of `rlinf-actors top` in docs/how-to/watch-a-cluster.md is what the command draws."""

from __future__ import annotations

import time

from rlinf_actors.cli.top.screen import drawn
from rlinf_actors.cli.top.view import Choice
from tests import pictures, shown_cluster

PICTURE = pictures.DOCS / "how-to" / "pictures" / "top.svg"
COLUMNS, LINES = 122, 19


def test_picture_of_top_has_the_words_of_its_screen():
    shown, _ = drawn(shown_cluster.cluster(time.time()), Choice(sort="CPU"), COLUMNS, LINES)
    if pictures.MAKES:
        PICTURE.write_text(pictures.terminal_svg(shown, COLUMNS, "rlinf-actors top", "top"))
    picture = PICTURE.read_text()
    assert pictures.same(pictures.lines_of_svg(picture), pictures.lines_of(shown, COLUMNS)), pictures.AGAIN
    assert len(picture) < pictures.MOST_BYTES
