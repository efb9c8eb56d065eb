"""Tensors between several GPUs of one machine: lanes of NCCL, staging in their place, broadcasts by one group.

Each test is skipped if the machine has fewer GPUs than it needs.
"""

from __future__ import annotations

import pytest

from rlinf_actors import PackedPlacementStrategy, WorkerDiedError

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.torch, pytest.mark.timeout(300)]

MIB = 1 << 20


@pytest.fixture
def launched(cluster):
    """Launches groups that end with the test, one rank on each of the GPUs *first* to *last*."""
    import gpu_workers as gw
    import torch

    groups = []

    def launch(name, first, last, **options):
        if torch.cuda.device_count() <= last:
            pytest.skip(f"needs {last + 1} GPUs, and the machine has {torch.cuda.device_count()}")
        group = gw.Gpu.create_group().launch(cluster, PackedPlacementStrategy(first, last), name=name, **options)
        groups.append(group)
        return group

    yield launch
    for group in groups:
        group.shutdown()


@pytest.fixture
def pair(launched):
    second = launched("b", 1, 1)  # first: it skips
    return launched("a", 0, 0), second


def test_a_lane_receives_into_the_given_tensor(pair):
    a, b = pair
    for n in (1.0, 2.0):
        hearing = b.hear_by_lane(256, "a")
        a.say_tensor(256, n, "b").wait()
        mean, copies, beside = hearing.wait()[0]
        assert (mean, copies) == (n, 0)
        assert beside < 64 * MIB
    assert (a.lanes().wait(), b.lanes().wait()) == ([1], [1])


def test_a_receive_that_timed_out_leaves_its_tensor_alone(pair):
    a, b = pair
    saying = a.say_when_asked(64, "b")
    assert b.hear_too_late(64, "a").wait() == [True]
    saying.wait()


def test_gpus_whose_nccl_differs_use_staging(pair):
    a, b = pair
    b.claim_other_nccl().wait()
    saying = a.say_fill(64, 3.0, "b")
    assert b.hear_fill("a").wait() == [(3.0, 3.0, "cuda:0")]
    saying.wait()
    assert (a.lanes().wait(), b.lanes().wait()) == ([0], [0])


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_broadcast_among_gpus_uses_one_process_group(launched, ranks):
    group = launched("a", 0, ranks - 1)
    for means, carried in group.give_all(ranks, 4, 64).wait():
        assert means == [0.0, 1.0, 2.0, 3.0]
        assert carried == 3, "all but the first, which asks"


def test_a_rank_that_dies_fails_the_broadcast_everywhere_and_the_next_one_works(launched):
    group = launched("a", 0, 2)
    works = [group.execute_on(rank).give_then_die(3, 2) for rank in range(3)]
    assert [work.wait() for work in works[:2]] == [["PeerDiedError"], ["PeerDiedError"]]
    with pytest.raises(WorkerDiedError):
        works[2].wait()
    left = [group.execute_on(rank).give_all(2, 2, 8) for rank in range(2)]
    assert [work.wait()[0][0] for work in left] == [[0.0, 1.0]] * 2
