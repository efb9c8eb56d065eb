"""Where a configuration may come from: YAML files, OmegaConf objects, plain mappings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlinf_actors.config.cluster_config import ClusterConfig, NodeGroupConfig
from rlinf_actors.config.config_values import SexagesimalInt, load_yaml, parse_yaml
from rlinf_actors.errors import ConfigError

TEXT = """
defaults: &ranks 0-1
seed: ${missing}
cluster:
  num_nodes: 2
  component_placement:
    actor,rollout: 0-7
    env: {node_group: 4090, placement: "1:0"}
  node_groups:
    - &base
      label: 4090
      node_ranks: *ranks
      ignore_hardware: false
    - <<: *base
      label: other
      ignore_hardware: true
"""


def test_a_file_its_section_and_its_omegaconf_objects_are_equal(tmp_path: Path) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(TEXT)
    expected = ClusterConfig.from_any(parse_yaml(TEXT))
    assert ClusterConfig.from_any(file) == expected
    assert ClusterConfig.from_any(str(file)) == expected
    assert ClusterConfig.from_any(parse_yaml(TEXT)["cluster"]) == expected
    whole = OmegaConf.create(parse_yaml(TEXT))  # "seed" cannot be resolved, and need not be
    assert ClusterConfig.from_any(whole) == expected
    assert ClusterConfig.from_any(whole.cluster) == expected
    assert ClusterConfig.from_any({"cluster": whole.cluster}) == expected
    assert expected.node_groups[1].ignore_hardware


def test_interpolations_and_list_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "3")
    config = OmegaConf.create(
        {
            "last": 2,
            "cluster": {
                "num_nodes": "${oc.env:NNODES}",
                "node_groups": [
                    {"label": "x", "node_ranks": [0, "${last}"], "env_configs": [{"node_ranks": "${..node_ranks}"}]}
                ],
            },
        }
    )
    with pytest.raises(ConfigError, match="OmegaConf cannot resolve it"):
        ClusterConfig.from_any(config)
    config.cluster.node_groups[0].env_configs[0].node_ranks = "${cluster.node_groups[0].node_ranks}"
    read = ClusterConfig.from_any(config)
    assert read.num_nodes == 3
    assert read.node_groups[0].env_configs[0].node_ranks == [0, 2]
    assert NodeGroupConfig.from_any(config.cluster.node_groups[0], num_nodes=3) == read.node_groups[0]


def test_omegaconf_inside_a_plain_mapping() -> None:
    config = {"num_nodes": 1, "node_groups": OmegaConf.create([{"label": "x", "node_ranks": 0}])}
    assert ClusterConfig.from_any(config).node_groups[0].label == "x"


@pytest.mark.parametrize("value", ["???", "${nowhere}"])
def test_values_that_omegaconf_cannot_give(value: str) -> None:
    for config in (OmegaConf.create({"cluster": {"num_nodes": value}}), OmegaConf.create({"num_nodes": value})):
        with pytest.raises(ConfigError, match="OmegaConf cannot resolve it") as caught:
            ClusterConfig.from_any(config)
        assert caught.value.path == "cluster"
    with pytest.raises(ConfigError, match=r"cannot be resolved|OmegaConf cannot resolve it"):
        ClusterConfig.from_any(OmegaConf.create({"cluster": value}))


@pytest.mark.parametrize(
    ("text", "path", "written"),
    [
        ("num_nodes: 1\ncomponent_placement: {a: 1:0}", "component_placement.a", "1:0"),
        ("num_nodes: 1\ncomponent_placement:\n  a: {placement: 12:30}", "component_placement.a.placement", "12:30"),
        ("num_nodes: 1:00", "num_nodes", "1:00"),
        ("num_nodes: 1\nnode_groups: [{label: 1:1, node_ranks: 0}]", "node_groups[0].label", "1:1"),
        ("num_nodes: 1\nnode_groups: [{label: a, node_ranks: [1:1]}]", "node_groups[0].node_ranks[0]", "1:1"),
        (
            "num_nodes: 1\nnode_groups: [{label: a, node_ranks: 0, "
            "env_configs: [{node_ranks: 0, env_vars: [{T: 1:1}]}]}]",
            "node_groups[0].env_configs[0].env_vars[0].T",
            "1:1",
        ),
    ],
)
def test_sexagesimal_numbers_are_refused(tmp_path: Path, text: str, path: str, written: str) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f'quote this: "{written}"') as caught:
        ClusterConfig.from_any(file)
    assert caught.value.path == f"cluster.{path}"


def test_sexagesimal_numbers_elsewhere_are_left_alone() -> None:
    read = parse_yaml("start: 1:30\nkey: '1:30'\nplain: 90\nzero: 0:0\n")
    assert read == {"start": 90, "key": "1:30", "plain": 90, "zero": "0:0"}
    assert isinstance(read["start"], SexagesimalInt)
    assert (read["start"].written, read["start"].line) == ("1:30", 1)
    assert type(read["plain"]) is int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("a: 1\na: 2\n", "'a' is given twice, in lines 1 and 2"),
        ("a: !!python/object/apply:os.system [true]", "is not valid YAML"),
        ("? [a]\n: 1", "is not valid YAML"),
        ("a: 2020-99-99", "is not valid YAML"),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text)
    file = tmp_path / "conf.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml(file)
    assert caught.value.path == str(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
        ClusterConfig.from_any(tmp_path / "none.yaml")
    assert caught.value.path == str(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        ClusterConfig.from_any(binary)


def test_omegaconf_is_not_imported_for_plain_configurations() -> None:
    code = (
        "import sys\n"
        "from rlinf_actors.placement.described import DescribedCluster\n"
        "from rlinf_actors.placement.plan import plan\n"
        "config = {'num_nodes': 1, 'component_placement': {'a': '0:0-3'}}\n"
        "plan(config, DescribedCluster.identical(1, 0))\n"
        "wrong = {'omegaconf', 'torch', 'zmq', 'asyncio'} & sys.modules.keys()\n"
        "assert not wrong, wrong\n"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
