"""CPU time of placement: from the rules of a configuration to the specs that a launch sends. Starts no process."""

from __future__ import annotations

import itertools
import time
from typing import Any

from msgspec.msgpack import encode

from benchmarks.scale.roles import Answer
from rlinf_actors.group.group_spec import worker_specs
from rlinf_actors.placement.component import ComponentPlacement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.wire.values import WorkerSpec

PER_NODE = 8
"""Accelerators of a node."""


def measure(nodes: int, per_node: int) -> dict[str, Answer]:
    """Return the figures of the two kinds of rules, for *per_node* processes on each of *nodes* nodes.

    *per_node* is rounded up to a multiple of the accelerators.
    """
    processes = nodes * PER_NODE * -(-per_node // PER_NODE)
    rules = {
        "accelerators": f"0-{nodes * PER_NODE - 1}:0-{processes - 1}",
        "nodes": {"node_group": "node", "placement": f"0-{nodes - 1}:0-{processes - 1}"},
    }
    return {name: _measure(nodes, rule) for name, rule in rules.items()}


def _measure(nodes: int, rule: Any) -> Answer:
    cluster = DescribedCluster.identical(nodes, PER_NODE)
    config = {"cluster": {"num_nodes": nodes, "component_placement": {"a": rule}}}
    template = WorkerSpec(
        "", "group", "namespace", 0, 1, 0, {"A": "1"}, cwd="/opt/project",
        sys_path=("/opt/project", "/opt/project/src", "/opt/venv/lib/python3.11/site-packages"),
    )  # fmt: skip
    times = [time.process_time()]
    components = ComponentPlacement(config, cluster)
    times.append(time.process_time())
    placements = components.get_strategy("a").get_placement(cluster)
    times.append(time.process_time())
    specs = worker_specs(template, placements, cluster)
    times.append(time.process_time())
    rules_s, placements_s, specs_s = (after - before for before, after in itertools.pairwise(times))
    return {
        "processes": len(specs),
        "rules_s": rules_s,
        "placements_s": placements_s,
        "specs_s": specs_s,
        "message_mb": len(encode(specs)) / 1e6,
    }
