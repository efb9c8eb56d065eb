"""Gigabytes through shared memory: memory, descriptors and shared memory of every process stay constant.

Usage: pytest tests/soak/test_memory_soak.py --soak-gib 100
"""

from __future__ import annotations

import memory_workers as mw
import pytest
from nightly import Figures

from rlinf_actors import Cluster, NodePlacementStrategy
from rlinf_actors.net.shared_memory import WARM

pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.torch]

SIZE = 32 << 20
OWN_KIB = 24 << 10
"""Permitted growth of a process."""


@pytest.mark.timeout(0)
def test_gigabytes_through_shared_memory_leave_nothing(
    rlinf_leak_check: None, soak_gib: float, figures: Figures
) -> None:
    with Cluster(num_nodes=1) as cluster:
        group = mw.Mover.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="movers")

        def rounds(count: int) -> None:
            for into in (True, False):
                taking = group.execute_on(1).take(SIZE, count, 0, into)
                group.execute_on(0).give(SIZE, count, 1, into).wait()
                taking.wait()
            for _ in range(count // 2):
                group.execute_on(0).echo(bytes(SIZE)).wait()

        rounds(6)
        before = [*group.usage().wait(), mw.usage()]
        count = max(6, -int(-soak_gib * (1 << 30) // (SIZE * 5 // 2)))
        rounds(count)
        for _ in range(2):
            group.usage().wait()  # what the driver released before has arrived
        after = [*group.usage().wait(), mw.usage()]
    for now, then in zip(after, before, strict=True):
        assert now["kib"] <= then["kib"] + OWN_KIB
        assert now["descriptors"] <= then["descriptors"] + 2
        assert now.get("arena_kib", 0) <= WARM >> 10  # how much is touched at once depends on who gets the processor
    assert [now["lent"] for now in after[:2]] == [0, 0]
    moved = 5 * count * SIZE // 2 / (1 << 30)
    figures.done(round(moved), round(soak_gib), "GiB")
    figures.add("growth, KiB", [now["kib"] - then["kib"] for now, then in zip(after, before, strict=True)])
