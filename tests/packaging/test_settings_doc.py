"""docs/settings.md names every variable that settings.py reads, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from rlinf_actors import settings

DOC = Path(__file__).parents[2] / "docs" / "settings.md"


def test_every_variable_is_documented():
    read = {
        value
        for name, value in vars(settings).items()
        if name.isupper() and isinstance(value, str) and re.fullmatch(r"(RLINF|CLUSTER)_[A-Z_]+", value)
    }
    named = set(re.findall(r"`((?:RLINF|CLUSTER)_[A-Z_]+)`", DOC.read_text()))
    assert named == read
