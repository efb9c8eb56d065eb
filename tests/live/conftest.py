from __future__ import annotations

from collections.abc import Iterator

import pace
import pytest

from rlinf_actors import Cluster
from rlinf_actors.testing.leaks import LeakCheck


@pytest.fixture(scope="module")
def module_leak_check() -> Iterator[None]:
    """As rlinf_leak_check, for a module whose tests share a cluster; in its pytestmark, by `usefixtures`."""
    check = LeakCheck()
    yield
    problems = check.problems()
    assert not problems, f"the tests of this module left behind: {'; '.join(problems)}"


@pytest.fixture(scope="module")
def running() -> Iterator[list[Cluster]]:
    """The private cluster that the tests of a module share, while it runs."""
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture(scope="module")
def shared_cluster(running: list[Cluster]) -> Cluster:
    """For fixtures of a module. A test has `cluster`."""
    if not running:
        running.append(Cluster(num_nodes=1))
    return running[0]


@pytest.fixture
def no_cluster(running: list[Cluster]) -> None:
    """End the module's cluster, for a test that has its own, since a driver has one at a time."""
    while running:
        running.pop().shutdown()


@pytest.fixture
def cluster(running: list[Cluster]) -> Iterator[Cluster]:
    """The module's cluster; the test's groups end with the test."""
    if not running:
        running.append(Cluster(num_nodes=1))
    [shared] = running
    lost = shared.runtime.lost
    before = lost.count
    yield shared
    left = lost.count - before
    for group in shared.runtime.groups.all():
        if group.owned and not group.gone.done():
            shared.runtime.io.submit(shared.runtime.groups.stop(group, 0.0)).result(pace.PATIENCE_S)
    assert not left, "the test left a result with an error that nobody awaited"
