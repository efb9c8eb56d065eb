"""Texts with a number of things."""

import pytest

from rlinf_actors.plurals import counted

pytestmark = pytest.mark.quick


def test_one_thing_is_not_told_in_the_plural():
    assert [counted(number, "process") for number in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]
    assert counted(1, "event", "waits|wait") == "1 event waits"
    assert counted(1500, "event", "waits|wait") == "1,500 events wait"
