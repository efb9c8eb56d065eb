"""Where clusters of these tests keep their files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path leaves room for unix sockets' names."""
    with tempfile.TemporaryDirectory(prefix="rlk-", dir="/tmp") as made:
        yield Path(made)
