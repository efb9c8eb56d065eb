from __future__ import annotations

from collections.abc import Iterator

import pace
import pytest

from rlinf_actors import Cluster


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """One private cluster for the tests of a module."""
    with Cluster(num_nodes=1) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The module's cluster; the test's groups end with the test."""
    lost = shared_cluster.runtime.lost
    before = lost.count
    yield shared_cluster
    assert lost.count == before, "the test left a result with an error that nobody awaited"
    for group in shared_cluster.runtime.groups.all():
        if group.owned and not group.gone.done():
            shared_cluster.runtime.io.submit(shared_cluster.runtime.groups.stop(group, 0.0)).result(pace.PATIENCE_S)
