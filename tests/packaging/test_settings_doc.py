"""docs/reference/settings.md names every variable that is read and every key of agentd.toml, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from agentd.config import KEYS, Config
from rlinf_actors import procfs, settings

DOC = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def test_every_variable_is_documented():
    read = {
        value
        for name, value in {**vars(settings), **vars(procfs)}.items()
        if name.isupper() and isinstance(value, str) and re.fullmatch(r"(RLINF|CLUSTER)_[A-Z_]+", value)
    }
    named = set(re.findall(r"`((?:RLINF|CLUSTER)_[A-Z_]+)`", DOC.read_text()))
    assert named == read


def test_every_key_of_agentd_toml_is_documented_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+\.\w+)` \| ([^|]+) \|", DOC.read_text(), re.MULTILINE))
    assert rows.keys() == {f"{table}.{key}" for table, keys in KEYS.items() for key in keys}
    for name, said in rows.items():
        default = getattr(Config(), name.partition(".")[2], None)
        if isinstance(default, (bool, float)):
            assert said == (str(default).lower() if isinstance(default, bool) else f"{default:g}"), name
