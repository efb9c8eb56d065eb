"""Whether arguments ask for the Cluster that runs: by their effect, and only those that were given."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rlinf_actors import Cluster
from rlinf_actors.cluster.connect import ClusterArguments, EffectiveArguments
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError

CONFIG = {"num_nodes": 2, "node_groups": [{"label": "a", "node_ranks": "0-1"}]}
SAME = {"node_groups": [{"node_ranks": [0, 1], "label": "a"}], "num_nodes": 2}
RUNNING = EffectiveArguments(
    (2, 4), ClusterConfig.from_any(CONFIG), os.path.abspath("logs"), "tcp://127.0.0.1:6380", "job-1"
)


@pytest.mark.parametrize(
    "asked",
    [
        ClusterArguments(),
        ClusterArguments(num_nodes=2),
        ClusterArguments(num_nodes=4),
        ClusterArguments(cluster_cfg=CONFIG),
        ClusterArguments(cluster_cfg=SAME),
        ClusterArguments(cluster_cfg=ClusterConfig.from_any(SAME)),
        ClusterArguments(log_dir="logs"),
        ClusterArguments(log_dir=Path("logs")),
        ClusterArguments(log_dir=os.path.abspath("logs") + "/"),
        ClusterArguments(head="127.0.0.1:6380"),
        ClusterArguments(head="localhost:6380"),
        ClusterArguments(head="tcp://127.0.0.1:6380"),
        ClusterArguments(namespace="job-1"),
        ClusterArguments(2, SAME, "logs", "127.0.0.1:6380", "job-1"),
    ],
)
def test_the_same(asked):
    RUNNING.check(asked)


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (ClusterArguments(num_nodes=3), "num_nodes"),
        (ClusterArguments(cluster_cfg={"num_nodes": 2}), "cluster_cfg"),
        (ClusterArguments(log_dir="other"), "distributed_log_dir"),
        (ClusterArguments(head="127.0.0.1:6381"), "head"),
        (ClusterArguments(namespace="job-2"), "namespace"),
    ],
)
def test_another(asked, path):
    with pytest.raises(ConfigError, match=r"is running in this process.*call shutdown\(\) on it first") as caught:
        RUNNING.check(asked)
    assert caught.value.path == path


@pytest.mark.parametrize("given", [-1, True, "2", 1.0])
def test_a_number_of_nodes_that_cannot_be(given):
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        ClusterArguments(num_nodes=given).wanted(None, 1)


def test_how_many_nodes_are_wanted():
    config = ClusterConfig.from_any(CONFIG)
    assert ClusterArguments().wanted(None, 7) == 7
    assert ClusterArguments(3).wanted(None, 7) == 3
    assert ClusterArguments().wanted(config, 7) == ClusterArguments(2).wanted(config, 7) == 2
    with pytest.raises(ConfigError, match="is 2 in cluster_cfg and 3 as an argument"):
        ClusterArguments(3).wanted(config, 7)
    assert ClusterArguments(0).wanted(None, 7) == 0
    assert ClusterArguments(0).wanted(config, 7) == 2


def test_zero_nodes_fits_every_running_cluster():
    RUNNING.check(ClusterArguments(num_nodes=0))


@pytest.mark.parametrize("timeout", [math.nan, "soon"])
def test_a_time_that_is_no_number_of_seconds_starts_nothing(timeout):
    with pytest.raises(ConfigError, match=r"timeout: the timeout is .*; it must be a number of seconds"):
        Cluster(timeout=timeout)
    assert not Cluster.has_initialized()
