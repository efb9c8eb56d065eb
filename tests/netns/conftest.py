"""Fixtures of the namespace tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a path short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="rlk-", dir="/tmp") as made:
        yield Path(made)
