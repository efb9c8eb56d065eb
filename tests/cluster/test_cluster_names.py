"""The names of RLinf's Cluster class that need no cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rlinf_actors.cluster.cluster import Cluster
from rlinf_actors.cluster.cluster_names import ClusterEnvVar, PathEnvMergeMode
from rlinf_actors.config.profiling_config import NsightConfig, RocprofSysConfig


def test_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster.get_full_env_var_name(ClusterEnvVar.LOG_LEVEL) == "RLINF_LOG_LEVEL"
    monkeypatch.delenv("RLINF_LOG_LEVEL", raising=False)
    assert Cluster.get_sys_env_var(ClusterEnvVar.LOG_LEVEL) is None
    assert Cluster.get_sys_env_var(ClusterEnvVar.LOG_LEVEL, "WARNING") == "WARNING"
    monkeypatch.setenv("RLINF_LOG_LEVEL", "DEBUG")
    assert Cluster.get_sys_env_var(ClusterEnvVar.LOG_LEVEL, "WARNING") == "DEBUG"
    assert set(Cluster.DEFAULT_SYS_ENV_VAR) == set(ClusterEnvVar)
    assert (Cluster.SYS_NAME, Cluster.NAMESPACE) == ("RLinf", "RLinf")


def test_a_cluster_has_its_number_of_nodes_under_the_older_name() -> None:
    class Three(Cluster):
        num_nodes = 3

    assert object.__new__(Three)._num_nodes == 3


def test_path_variables_are_merged_by_the_mode() -> None:
    node, ours = {"PYTHONPATH": "/a:/b", "X": "1"}, {"PYTHONPATH": "/new:/a", "X": "2"}
    merged = Cluster.merge_worker_env_vars(base_env_vars=node, incoming_env_vars=ours, mode=PathEnvMergeMode.APPEND)
    assert merged == {"PYTHONPATH": "/new:/a:/b", "X": "2"}
    assert Cluster.merge_worker_env_vars(node, ours, PathEnvMergeMode.OVERRIDE) == ours
    assert Cluster._merge_path_like_env_value("HTTP_PROXY", "http://old", "http://new") == "http://new"
    assert Cluster.get_path_env_merge_mode({}) is PathEnvMergeMode.APPEND
    assert Cluster.get_path_env_merge_mode({"RLINF_PATH_ENV_MERGE_MODE": "Override"}) is PathEnvMergeMode.OVERRIDE
    with pytest.raises(ValueError, match="RLINF_PATH_ENV_MERGE_MODE is 'both'; it must be append or override"):
        Cluster.get_path_env_merge_mode({"RLINF_PATH_ENV_MERGE_MODE": "both"})


def test_a_port_is_found_without_a_cluster() -> None:
    assert 1023 < Cluster.find_free_port(max_port_num=30_000) < 30_000


def test_no_cluster_no_instance() -> None:
    assert not Cluster.has_initialized()
    assert not hasattr(Cluster, "_instance")


def test_the_command_line_under_a_profiler(tmp_path: Path) -> None:
    nsight = NsightConfig(worker_groups=["actor"], options={"t": "cuda,nvtx"}, output_dir=str(tmp_path / "new"))
    line = shlex.split(Cluster.modify_profile_context(sys.executable, "actor:0", nsight))
    assert line[:2] == ["nsys", "profile"]
    assert (line[line.index("-t") + 1], line[-1]) == ("cuda,nvtx", sys.executable)
    assert line[line.index("-o") + 1] == f"{tmp_path}/new/rlinf_profile_actor_0_%p"
    assert Cluster.modify_profile_context(sys.executable, "rollout:0", nsight) == sys.executable
    assert Cluster.modify_profile_context(sys.executable, "actor:0", None) == sys.executable
    rocprof = RocprofSysConfig(worker_groups=["actor"], output_dir=str(tmp_path))
    found = Cluster.get_profiling_env_vars_for_worker("actor:1", rocprof)
    assert found["ROCPROFSYS_OUTPUT_PATH"] == str(tmp_path)
    assert found["ROCPROFSYS_OUTPUT_PREFIX"] == "rlinf_profile_actor_1_%p"
    assert Cluster.get_profiling_env_vars_for_worker("rollout:1", rocprof) == {}
