from __future__ import annotations

import json

import pytest

CONF = """
cluster:
  num_nodes: 2
  component_placement:
    env: {node_group: cluster, placement: "0-1"}
    rollout: {node_group: cluster, placement: "0-2"}
"""
NODES = """
nodes:
  - {count: 2, ip: 10.0.0.1, accelerator: {type: NV_GPU, model: A800, number: 2}}
"""


@pytest.fixture
def planned(shown, tmp_path):
    (tmp_path / "conf.yaml").write_text(CONF)
    (tmp_path / "nodes.yaml").write_text(NODES)
    return lambda *more: shown("plan", str(tmp_path / "conf.yaml"), "--describe", str(tmp_path / "nodes.yaml"), *more)


def test_routes_between_two_components_are_a_table(planned):
    code, out, err = planned("--routes", "env,rollout", "--batch-size", "12")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "env to rollout: 2 to 3 ranks, a batch of 12 (any multiple of 6)",
        "FROM  NODE  TO  NODE  ELEMENTS  SIZE",
        "0     0     0   0     0-3       4",
        "0     0     1   0     4-5       2",
        "1     0     1   0     6-7       2",
        "1     0     2   1     8-11      4",
    ]


def test_routes_as_json_in_both_directions(planned):
    code, out, _ = planned("--routes", "env,rollout", "--routes", "rollout,env", "--json")
    there, back = json.loads(out)
    assert code == 0
    assert (there["sender"], there["batch_size"], there["multiple"]) == ("env", 6, 6)
    pairs = [(one["src_rank"], one["dst_rank"], one["size"]) for one in there["shards"]]
    assert pairs == [(0, 0, 2), (0, 1, 1), (1, 1, 1), (1, 2, 2)]
    assert sorted((one["dst_rank"], one["src_rank"], one["size"]) for one in back["shards"]) == pairs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--routes", "env,actor"), "there is no component 'actor'; components: env, rollout"),
        (("--routes", "env"), "must name two components"),
        (("--routes", "env,rollout", "--batch-size", "7"), "batch_size (7) must be divisible by src_world_size (2)"),
    ],
)
def test_routes_that_cannot_be_are_refused(planned, arguments, message):
    code, out, err = planned(*arguments)
    assert (code != 0, out) == (True, "")
    assert message in err
    assert "Traceback" not in err
