"""pytest plugin: clusters as fixtures, and a check that a test leaves nothing behind.

pytest loads it in every run of an environment with rlinf-actors, so its import must stay cheap.

Fixtures:

* ``rlinf_cluster``: a private cluster of one node, for plain and for ``async def`` tests.
* ``rlinf_cluster_async``: the same, started without blocking the test's event loop (needs pytest-asyncio).
* ``local_cluster``: ``local_cluster(num_nodes=3, hardware=...)`` starts a LocalCluster that ends with the test.
* ``rlinf_leak_check``: used by the others; a test can use it alone. It fails a test that leaves a process, thread, file
descriptor, file in a run directory, or shared memory behind.

The report of a failed test shows the ends of the logs of its LocalClusters. For a cluster that many tests share (a
fixture of module scope), use LocalCluster directly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.testing.local_cluster import LocalCluster

try:
    import pytest_asyncio
except ImportError:
    pytest_asyncio = None  # type: ignore[assignment]

LOG_LINES = 50
"""Lines of each node's log in the report of a failed test."""

runs: list[pytest.Config] = []
"""Runs of pytest in this process. During a run, runtime.lost_errors does not change the exit code."""


def pytest_configure(config: pytest.Config) -> None:
    """Record that a run of pytest begins in this process, so that runtime.lost_errors does not change the exit code."""
    runs.append(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Record that the run of pytest has ended (see `pytest_configure`)."""
    runs.remove(config)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, None]:
    """Add the ends of the logs of LocalCluster nodes to the report of a failed test, because the log files are removed
    with the cluster.
    """
    outcome = yield
    report = outcome.get_result()
    module = sys.modules.get("rlinf_actors.testing.local_cluster")
    for local in list(module.started) if module is not None else ():
        for node in local.nodes if report.failed else ():
            try:
                lines = node.log().splitlines()[-LOG_LINES:]
            except Exception as error:  # noqa: BLE001 - an error here would end pytest and hide the test's failure
                lines = [f"it cannot be read: {error!r}"]
            report.sections.append((f"log of node {node.rank} in {node.run_dir}", "\n".join(lines)))
        if report.when == "teardown" and local.stopped and module is not None:
            module.started.discard(local)


@pytest.fixture
def rlinf_leak_check() -> Iterator[None]:
    """Fail the test if it leaves a process, thread, file descriptor, file or shared memory behind."""
    from rlinf_actors.testing.leaks import LeakCheck

    check = LeakCheck()
    yield
    problems = check.problems()
    if problems:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {problem}" for problem in problems), pytrace=False)


@pytest.fixture
def _rlinf_apart(rlinf_leak_check: None) -> Iterator[None]:
    """Let commands of a test, such as `estop`, find no head of the user."""
    from rlinf_actors.net.discovery import PRIVATE
    from rlinf_actors.settings import HEAD, HEADS_DIR, RUN_DIR

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HEAD, PRIVATE)
        patch.setenv(HEADS_DIR, os.environ[RUN_DIR])
        yield


@pytest.fixture
def rlinf_cluster(_rlinf_apart: None) -> Iterator[Cluster]:
    """Provide a private cluster of one node, which is shut down after the test."""
    from rlinf_actors.cluster.cluster import Cluster

    cluster = Cluster(num_nodes=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def local_cluster(_rlinf_apart: None) -> Iterator[Callable[..., LocalCluster]]:
    """Provide a function that starts a LocalCluster (of 3 nodes by default), which ends with the test."""
    from rlinf_actors.testing.local_cluster import LocalCluster

    started: list[LocalCluster] = []

    def start(num_nodes: int = 3, hardware: Any = None, **options: Any) -> LocalCluster:
        made = LocalCluster(num_nodes, hardware, **options)
        started.append(made)
        return made.start()

    yield start
    for made in started:
        made.stop()


if pytest_asyncio is not None:

    @pytest_asyncio.fixture
    async def rlinf_cluster_async(_rlinf_apart: None) -> AsyncIterator[Cluster]:
        """Provide a private cluster of one node to an ``async def`` test, and shut the cluster down after the test."""
        from rlinf_actors.cluster.cluster import Cluster

        async with Cluster.connect(num_nodes=1) as cluster:
            yield cluster
