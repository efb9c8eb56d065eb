from __future__ import annotations

import pytest


@pytest.fixture
def kill_rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("kill_rounds"))


@pytest.fixture
def kill_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("kill_seed"))
