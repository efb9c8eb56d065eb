"""init_process_group as RLinf's FSDP, Megatron, vLLM and SGLang workers use it: on the CPU, with gloo."""

from __future__ import annotations

import pace
import pytest

from rlinf_actors import Cluster, NodePlacementStrategy

PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp")
torch, *_ = (pytest.importorskip(name) for name in PRELOADED)

from engine_workers import (  # noqa: E402
    FSDPActor,
    MegatronActor,
    SGLangRollout,
    VLLMRollout,
    rows,
    tiny_model,
    trained_alone,
)

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.timeout(pace.LIVE_TIMEOUT_S)]
BATCH, STEPS = 8, 3


@pytest.fixture(autouse=True)
def imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the template import what each worker would: optimizers need torch._dynamo, a second of CPU."""
    monkeypatch.setattr("rlinf_actors.cluster.service.PRELOADED", PRELOADED)


def launch(cluster: Cluster, cls, ranks: int, name: str, *arguments):
    strategy = NodePlacementStrategy([0] * ranks)
    return cls.create_group(*arguments).launch(cluster, placement_strategy=strategy, name=name)


def assert_as_alone(parameters):
    for each, alone in zip(parameters, trained_alone(BATCH, STEPS), strict=True):
        torch.testing.assert_close(each, alone)


def test_fsdp_workers_train_as_one_process_does(cluster: Cluster):
    actor = launch(cluster, FSDPActor, 2, "fsdp")
    actor.init_worker().wait(pace.PATIENCE_S)
    for parameters in actor.run_training(BATCH, STEPS).wait(pace.PATIENCE_S):
        assert_as_alone(parameters)
    assert actor.missing().wait(pace.PATIENCE_S) == [[], []]
    actor.shut().wait(pace.PATIENCE_S)


def test_megatron_workers_train_as_one_process_does_on_a_grid_of_groups(cluster: Cluster):
    actor = launch(cluster, MegatronActor, 4, "megatron", 2)
    actor.init_worker().wait(pace.PATIENCE_S)
    for parameters in actor.run_training(BATCH, STEPS).wait(pace.PATIENCE_S):
        assert_as_alone(parameters)
    assert all(seconds["training"] > 0 for seconds in actor.seconds().wait(pace.PATIENCE_S))
    actor.shut().wait(pace.PATIENCE_S)


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(VLLMRollout, marks=pytest.mark.nightly("the shards of SGLang make their group in the same way")),
        SGLangRollout,
    ],
)
def test_engine_shards_have_a_group_of_their_own_and_receive_weights_from_actors(cluster: Cluster, cls):
    name = cls.__name__
    actor = launch(cluster, FSDPActor, 1, f"actor-of-{name}")
    actor.init_worker().wait(pace.PATIENCE_S)
    rollout = launch(cluster, cls, 1, name)
    assert rollout.init_worker(2).wait(pace.PATIENCE_S) == [[(f"{name}:0:{shard}", 0, shard) for shard in range(2)]]
    received = rollout.sync_model_from_actor(f"actor-of-{name}")
    actor.sync_model_to_rollout(name, [[0, 0], [0, 1]]).wait(pace.PATIENCE_S)
    assert received.wait(pace.PATIENCE_S) == [[4, 4]]
    expected = tiny_model()(rows(0, 3)).detach()
    for output in rollout.generate(rows(0, 3)).wait(pace.PATIENCE_S)[0]:
        torch.testing.assert_close(output, expected)
    assert set(rollout.shutdown_engine().wait(pace.PATIENCE_S)[0]) == {0}
    actor.shut().wait(pace.PATIENCE_S)
