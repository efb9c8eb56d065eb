"""The net_emulation section: endpoints, and what is wrong with a pair."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.config.net_emulation_config import (
    BandwidthGroup,
    CrossDCPair,
    NetEmulationConfig,
    check_group,
    normal,
)
from rlinf_actors.errors import ConfigError

pytestmark = pytest.mark.quick


def config(section: dict[str, Any], **keys: Any) -> NetEmulationConfig:
    found = ClusterConfig.from_any({"num_nodes": 2, "net_emulation": {"enabled": True, **section}, **keys})
    assert found.net_emulation is not None
    return found.net_emulation


def pair(src: Any = "Env:0", dst: Any = "Actor:0", delay_ms: Any = 10, **keys: Any) -> dict[str, Any]:
    return {"crossdc_pairs": [{"src": src, "dst": dst, "delay_ms": delay_ms, **keys}]}


def test_ranges_and_lists_are_pairs_of_single_endpoints() -> None:
    found = config(pair(["Env:0-1", "Env:3"], "Actor:0,2"))
    assert [(each.src, each.dst) for each in found.crossdc_pairs] == [
        (f"Env:{src}", f"Actor:{dst}") for src in (0, 1, 3) for dst in (0, 2)
    ]
    assert found.symmetric
    assert config({"bandwidth_groups": [{"members": ["Env:0-1"], "bandwidth_mbps": 100}]}).bandwidth_groups == (
        BandwidthGroup(("Env:0", "Env:1"), 100.0),
    )


def test_all_keys_of_a_pair() -> None:
    keys = {"jitter_ms": 1, "bandwidth_mbps": 800, "loss": 0.1, "retransmit_ms": 50}
    assert config(pair(**keys)).crossdc_pairs == (CrossDCPair("Env:0", "Actor:0", 10.0, 1.0, 800.0, 0.1, 50.0),)


@pytest.mark.parametrize(
    ("endpoint", "form"),
    [
        ("EnvGroup:0", "env:0"),
        ("Env:0", "env:0"),
        ("Env", "env:*"),
        ("Env:*", "env:*"),
        ("Group:1", "group:1"),
        ("driver", "driver:*"),
    ],
)
def test_groups_are_compared_without_case_and_suffix(endpoint: str, form: str) -> None:
    assert normal(endpoint) == form


@pytest.mark.parametrize(
    ("section", "path", "text"),
    [
        (pair("Evn:0"), "crossdc_pairs[0].src", "'Evn', which is no component; did you mean 'env'"),
        (pair("Env:0", ["Actor:0", "Rolout:1"]), "crossdc_pairs[0].dst[1]", "did you mean 'rollout'"),
        (pair("ndoe:0"), "crossdc_pairs[0].src", "did you mean 'node'"),
        (pair("Env:0-"), "crossdc_pairs[0].src", "has the ranks '0-'"),
        (pair("Env:3-1"), "crossdc_pairs[0].src", "has the ranks '3-1'"),
        (pair(":0"), "crossdc_pairs[0].src", "must be GROUP:RANKS"),
        (pair("Env:"), "crossdc_pairs[0].src", "must be GROUP:RANKS"),
        (pair([]), "crossdc_pairs[0].src", "is empty"),
        (pair(7), "crossdc_pairs[0].src", "is 7"),
        (pair("node:0", "node:2"), "crossdc_pairs[0].dst", "has node 2, but the cluster has 2 nodes"),
        (pair("driver:0"), "crossdc_pairs[0].src", "the driver has no ranks"),
        (pair(delay_ms=-1), "crossdc_pairs[0].delay_ms", "from 0 up"),
        (pair(delay_ms=float("inf")), "crossdc_pairs[0].delay_ms", "from 0 up"),
        (pair(delay_ms="soon"), "crossdc_pairs[0].delay_ms", "is 'soon'"),
        (pair(loss=1), "crossdc_pairs[0].loss", "from 0 to below 1"),
        (pair(bandwidth_mbps=0), "crossdc_pairs[0].bandwidth_mbps", "above 0"),
        (pair(delay=5), "crossdc_pairs[0].delay", "did you mean 'delay_ms'"),
        ({"crossdc_pair": []}, "crossdc_pair", "did you mean 'crossdc_pairs'"),
        ({"bandwidth_groups": [{"members": ["Env:0"], "bandwidth_mbps": 0}]}, "bandwidth_groups[0].bandwidth_mbps", ""),
        (
            {
                "bandwidth_groups": [
                    {"members": "Env:0-1", "bandwidth_mbps": 1},
                    {"members": "env:1", "bandwidth_mbps": 2},
                ]
            },
            "bandwidth_groups[1]",
            "env:1 is in bandwidth_groups[0] already",
        ),
    ],
)
def test_wrong_section_is_refused_with_its_place_and_remedy(section: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(section, component_placement={"actor": 0, "env,rollout": "1"})
    assert raised.value.path == f"cluster.net_emulation.{path}"
    assert text in str(raised.value)


@pytest.mark.parametrize("name", ["Env", "envgroup", "Env2", "Actors", "Simulator", "my_channel"])
def test_other_names_of_groups_are_taken_because_a_launch_may_choose_any(name: str) -> None:
    assert config(pair(f"{name}:0"), component_placement={"actor": 0, "env": 1}).crossdc_pairs


def test_rank_that_the_launched_group_does_not_have_is_refused() -> None:
    found = config(pair("Env:0-3"))
    check_group(found, "EnvGroup", 4)
    check_group(found, "other", 1)
    with pytest.raises(ConfigError, match=r"has Env:2, but group 'EnvGroup' is launched with 2 ranks"):
        check_group(found, "EnvGroup", 2)


def test_section_that_is_not_enabled_is_none_for_from_cfg() -> None:
    assert NetEmulationConfig.from_cfg(None) is None
    assert NetEmulationConfig.from_cfg(pair()) is None
    assert NetEmulationConfig.from_cfg({"enabled": True, **pair()}) == config(pair())
