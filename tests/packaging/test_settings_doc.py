"""docs/reference/settings.md names every variable that is read and every key of agentd.toml, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from agentd.config import KEYS, Config
from rlinf_actors import procfs, settings
from rlinf_actors.errors import ConfigError

DOC = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def test_every_variable_is_documented():
    read = {
        value
        for name, value in {**vars(settings), **vars(procfs)}.items()
        if name.isupper() and isinstance(value, str) and re.fullmatch(r"(RLINF|CLUSTER)_[A-Z_]+", value)
    }
    named = set(re.findall(r"`((?:RLINF|CLUSTER)_[A-Z_]+)`", DOC.read_text()))
    assert named == read


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "": 1}


def defaults_of(variable: str) -> set[object]:
    """The defaults of the fields that the variable changes."""
    found: set[object] = set()
    for kind in (settings.Settings, settings.CodeSettings):
        plain = kind.load({})
        for value in ("1", "0", "1048577"):
            try:
                changed = kind.load({variable: value})
            except ConfigError:
                continue
            fields = [name for name in plain.__struct_fields__ if getattr(changed, name) != getattr(plain, name)]
            found |= {getattr(plain, name) for name in fields}
    return found


def test_numbers_that_are_defaults_of_variables_are_true():
    rows = re.findall(r"^\| `(\w+)` \| `?(\d[\d,]*)`?(?: (\wiB))?(?:[,;] [^|]*)? \|", DOC.read_text(), re.MULTILINE)
    told = {name: float(number.replace(",", "")) * UNITS[unit] for name, number, unit in rows}
    true = {name: defaults for name in told if (defaults := defaults_of(name))}  # others are read in workers alone
    assert len(true) > 10
    assert {name: number for name, number in told.items() if number not in true.get(name, {number})} == {}


def test_every_key_of_agentd_toml_is_documented_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+\.\w+)` \| ([^|]+) \|", DOC.read_text(), re.MULTILINE))
    assert rows.keys() == {f"{table}.{key}" for table, keys in KEYS.items() for key in keys}
    for name, said in rows.items():
        default = getattr(Config(), name.partition(".")[2], None)
        if isinstance(default, (bool, float)):
            assert said == (str(default).lower() if isinstance(default, bool) else f"{default:g}"), name
