from __future__ import annotations

import group_kit
import pytest


@pytest.fixture
async def world():
    """A group of three stand-in workers."""
    return group_kit.World()
