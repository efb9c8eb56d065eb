from __future__ import annotations

import pytest


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("soak_seconds"))


@pytest.fixture
def soak_gib(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("soak_gib"))


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int | None:
    return request.config.getoption("soak_seed")
