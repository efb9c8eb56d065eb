"""Workers draw numbers of their own, however they were started; the same only where the user seeds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import uuid
from collections.abc import Iterator

import pytest

from rlinf_actors import Cluster, NodePlacementStrategy, RestartPolicy, Worker, WorkerDiedError
from rlinf_actors.testing import LocalCluster

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.live, pytest.mark.torch]
KINDS = ("torch", "numpy", "generator", "random", "uuid")


class Drawing(Worker):
    def __init__(self, seed: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)

    def pid(self) -> int:
        return os.getpid()

    def draw(self) -> dict[str, object]:
        return {
            "torch": tuple(torch.randint(1 << 60, (4,)).tolist()),
            "numpy": int(np.random.randint(1 << 60)),
            "generator": int(self.generator.integers(1 << 60)),
            "random": random.random(),
            "uuid": str(uuid.uuid4()),
        }


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with LocalCluster(2) as local:
        yield local.cluster()


def test_every_worker_draws_numbers_of_its_own(nodes):
    """Two groups on two nodes, forked and started afresh, and a rank that was restarted."""
    both = NodePlacementStrategy([0, 0, 1])
    restart = RestartPolicy.on_failure(max_restarts=1, within_s=300, backoff_s=0)
    groups = [
        Drawing.create_group().launch(nodes, both, name="first", restart=restart),
        Drawing.create_group().launch(nodes, both, name="second"),
        Drawing.create_group().launch(nodes, NodePlacementStrategy([0]), name="afresh", start_method="spawn"),
    ]
    drawn = [drew for group in groups for drew in group.draw().wait()]
    one = groups[0].execute_on(0)
    before = one.pid().wait()
    os.kill(before[0], signal.SIGKILL)
    with contextlib.suppress(WorkerDiedError):
        one.pid().wait()
    drawn += one.draw().wait()
    assert one.pid().wait() != before
    for kind in KINDS:
        assert len({drew[kind] for drew in drawn}) == len(drawn), kind


def test_seeded_workers_draw_the_same(nodes):
    group = Drawing.create_group(7).launch(nodes, NodePlacementStrategy([0, 1]), name="seeded")
    one, other = group.draw().wait()
    assert [one[kind] == other[kind] for kind in KINDS] == [True, True, True, True, False]
