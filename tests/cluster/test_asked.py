"""Whether arguments ask for the Cluster that runs: by their effect, and only those that were given."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rlinf_actors import Cluster
from rlinf_actors.cluster.connect import Asked, InUse
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError

CONFIG = {"num_nodes": 2, "node_groups": [{"label": "a", "node_ranks": "0-1"}]}
SAME = {"node_groups": [{"node_ranks": [0, 1], "label": "a"}], "num_nodes": 2}
RUNNING = InUse((2, 4), ClusterConfig.from_any(CONFIG), os.path.abspath("logs"), "tcp://127.0.0.1:6380", "job-1")


@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(num_nodes=2),
        Asked(num_nodes=4),
        Asked(cluster_cfg=CONFIG),
        Asked(cluster_cfg=SAME),
        Asked(cluster_cfg=ClusterConfig.from_any(SAME)),
        Asked(log_dir="logs"),
        Asked(log_dir=Path("logs")),
        Asked(log_dir=os.path.abspath("logs") + "/"),
        Asked(head="127.0.0.1:6380"),
        Asked(head="localhost:6380"),
        Asked(head="tcp://127.0.0.1:6380"),
        Asked(namespace="job-1"),
        Asked(2, SAME, "logs", "127.0.0.1:6380", "job-1"),
    ],
)
def test_the_same(asked):
    RUNNING.check(asked)


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (Asked(num_nodes=3), "num_nodes"),
        (Asked(cluster_cfg={"num_nodes": 2}), "cluster_cfg"),
        (Asked(log_dir="other"), "distributed_log_dir"),
        (Asked(head="127.0.0.1:6381"), "head"),
        (Asked(namespace="job-2"), "namespace"),
    ],
)
def test_another(asked, path):
    with pytest.raises(ConfigError, match=r"is running in this process.*call shutdown\(\) on it first") as caught:
        RUNNING.check(asked)
    assert caught.value.path == path


@pytest.mark.parametrize("given", [0, -1, True, "2", 1.0])
def test_a_number_of_nodes_that_cannot_be(given):
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        Asked(num_nodes=given).wanted(None, 1)


def test_how_many_nodes_are_wanted():
    config = ClusterConfig.from_any(CONFIG)
    assert Asked().wanted(None, 7) == 7
    assert Asked(3).wanted(None, 7) == 3
    assert Asked().wanted(config, 7) == Asked(2).wanted(config, 7) == 2
    with pytest.raises(ConfigError, match="is 2 in cluster_cfg and 3 as an argument"):
        Asked(3).wanted(config, 7)


@pytest.mark.parametrize("timeout", [math.nan, "soon"])
def test_a_time_that_is_no_number_of_seconds_starts_nothing(timeout):
    with pytest.raises(ConfigError, match=r"timeout: the timeout is .*; it must be a number of seconds"):
        Cluster(timeout=timeout)
    assert not Cluster.has_initialized()
