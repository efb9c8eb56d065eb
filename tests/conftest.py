"""What all tests share: which of them can run here, and which must."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator

import pytest

from rlinf_actors.testing import pytest_plugin


def pytest_configure(config: pytest.Config) -> None:
    """Where the project runs from its checkout, nothing has registered the plugin yet."""
    if not config.pluginmanager.is_registered(pytest_plugin):
        config.pluginmanager.register(pytest_plugin)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch", action="store_true", help="leave out the tests marked torch, also where CI is set"
    )
    parser.addoption("--soak-seconds", type=float, default=15, help="how long the soak lasts (tests/soak)")
    parser.addoption(
        "--malformed-connections", type=int, default=300, help="how many strangers come (tests/live/test_strangers.py)"
    )
    parser.addoption("--cycles", type=int, default=30, help="how many starts and stops tests/cycles makes")
    parser.addoption("--kill-rounds", type=int, default=1, help="how often each is killed (tests/kills)")
    parser.addoption("--kill-seed", type=int, default=0, help="of when, and of who of two is killed first")
    parser.addoption(
        "--default-timers", action="store_true", help="cuts and stand stills with the default leases: 30 s each"
    )
    parser.addoption("--soak-seed", type=int, help="of the soak: the plan of an earlier run; by default a new one")
    parser.addoption("--chaos-seconds", type=float, default=60, help="how long the chaos lasts (tests/chaos)")
    parser.addoption("--chaos-seed", type=int, help="of the chaos: the faults of an earlier run; by default new ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need torch are left out where it is not installed; where CI is set, only if that is asked for."""
    marked = [item for item in items if item.get_closest_marker("torch")]
    if not marked or (importlib.util.find_spec("torch") and not config.option.without_torch):
        return
    if os.environ.get("CI") and not config.option.without_torch:
        raise pytest.UsageError(
            f"{len(marked)} tests need torch, which is not installed, and CI is set: install it "
            "(pip install -c constraints.txt torch), or pass --without-torch"
        )
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="torch is not installed"))


@pytest.fixture(autouse=True)
def orphans_are_inits() -> Iterator[None]:
    """A test that runs an agent's code in this process makes it a subreaper; the next test's orphans are not ours."""
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
