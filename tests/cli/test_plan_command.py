from __future__ import annotations

import json

import pytest
from cli_kit import node

from rlinf_actors.wire.client_messages import Status

CONF = """
cluster:
  num_nodes: 2
  component_placement:
    actor: {node_group: a800, placement: 0-7}
    agent: {node_group: node, placement: "0-1:0-3"}
  node_groups:
    - {label: a800, node_ranks: 0-1}
"""
NODES = """
nodes:
  - {count: 2, ip: 10.0.0.1, accelerator: {type: NV_GPU, model: A800, number: 4}}
"""


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    return str(path)


def test_plan_uses_described_nodes(shown, conf, tmp_path):
    described = tmp_path / "nodes.yaml"
    described.write_text(NODES)
    code, out, err = shown("plan", conf, "--describe", str(described))
    assert (code, err) == (0, "")
    assert "actor: 8 processes on a800 (0-7)" in out
    data = json.loads(shown("plan", conf, "--describe", str(described), "--json")[1])
    assert [component["world_size"] for component in data["components"]] == [8, 4]


def test_plan_uses_the_real_nodes(shown, conf):
    code, out, err = shown("plan", conf)
    assert (code, err) == (0, "")
    assert "actor: 8 processes on a800 (0-7)" in out


def test_plan_shows_provisional_ranks(shown, conf):
    unranked = [node(-1, gpus=4)]
    other = node(0, gpus=4)
    code, out, err = shown("plan", conf, "--json", status=Status("e", "0", 1.0, [other, *unranked], [], []))
    assert code == 0
    assert [entry["id"] for entry in json.loads(out)["nodes"]] == ["id-n0", "id-nx"]
    assert "node ranks are not fixed yet" in err


def test_plan_names_a_missing_node(shown, conf):
    code, out, err = shown("plan", conf, status=Status("e", "0", 1.0, [node(0, gpus=4)], [], []))
    assert (code, out) == (69, "")
    assert "1 of 2 nodes registered; missing rank 1" in err


def test_configuration_error_has_its_path(shown, tmp_path):
    path = tmp_path / "conf.yaml"
    path.write_text(CONF.replace("0-7}", "0-8}"))
    described = tmp_path / "nodes.yaml"
    described.write_text(NODES)
    code, out, err = shown("plan", str(path), "--describe", str(described))
    assert (code, out) == (78, "")
    assert err.startswith("error: cluster.component_placement.actor")
    assert "Traceback" not in err


ROBOTS = """
cluster:
  num_nodes: 1
  component_placement:
    env: {node_group: arms, placement: "0-1"}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware: {type: %s, configs: [{node_rank: 0, robot_ip: 192.0.2.1}, {node_rank: 0, robot_ip: %s}]}
"""


@pytest.mark.parametrize("kind", ["Franka", "LabArm"])
def test_described_robots_are_not_checked(shown, tmp_path, kind):
    """No robot answers at these addresses; the package of the second type is not installed."""
    conf, described = tmp_path / "conf.yaml", tmp_path / "nodes.yaml"
    conf.write_text(ROBOTS % (kind, "192.0.2.2"))
    described.write_text("nodes: [{count: 1}]")
    code, out, err = shown("plan", str(conf), "--describe", str(described))
    assert (code, err) == (0, "")
    assert "env: 2 processes on arms (0-1)" in out


def test_wrongly_configured_described_robot_is_an_error(shown, tmp_path):
    conf, described = tmp_path / "conf.yaml", tmp_path / "nodes.yaml"
    conf.write_text(ROBOTS % ("Franka", "'not an address!'"))
    described.write_text("nodes: [{count: 1}]")
    code, out, err = shown("plan", str(conf), "--describe", str(described))
    assert (code, out) == (78, "")
    assert "cluster.node_groups[0].hardware.configs[1].robot_ip: " in err
