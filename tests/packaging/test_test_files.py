"""The files of tests: pytest imports them by their base names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_each_file_has_a_name_of_its_own():
    names = Counter(path.name for path in Path(__file__).parent.parent.rglob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "conftest.py"] == []
