"""The screen of `rlinf-actors top` in a real terminal, with names that try to act on it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from terminal import terminal

pytestmark = pytest.mark.slow

DRAW = """
import asyncio, sys, types
sys.path.insert(0, sys.argv[1])
from board_kit import board
from rlinf_actors.cli.top.screen import Screen
from rlinf_actors.cli.top.view import Choice

async def main():
    hostile = board("\\x1b[2J\\x1b]0;title\\x07\\x9b2J\\u202e[bold]")
    forever = asyncio.get_running_loop().create_future()
    sampler = types.SimpleNamespace(board=hostile, run=lambda: asyncio.wait([forever]))
    await Screen(sampler, Choice()).run()

asyncio.run(main())
"""


def test_names_of_members_do_not_act_on_the_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(str(Path(__file__).parents[1]), command=[sys.executable, "-c", DRAW]) as top:
        top.resize(250, 20)
        assert r"\x1b[2J\x1b]0;title" in top.until("[bold]")
        for view in "23":
            top.type(view)
            top.until("quit")
        top.type("/\x1b[31m\r")
        top.type("q")
        assert top.end() == 0, top.shown
    acting = re.findall(r"\x1b(?!\[(?:\??[0-9;]*[hlmH]))|[\x07\x9b\u202e]", top.shown)
    assert acting == []
