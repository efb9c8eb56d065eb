"""The ``component_placement`` section: which rule places which components. Pure.

ClusterConfig and ComponentPlacement read it. placement.grammar parses the placement strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlinf_actors.config.config_values import parse_labels, refuse_sexagesimal
from rlinf_actors.conversion import convert, join
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.node import CLUSTER_GROUP

PLACEMENT_EXAMPLE = "{actor: 0-7, env: {node_group: franka, placement: 0-1}}"
_PlacementForm: Any = Annotated[dict[Any, Any], Meta(description=f"a mapping such as {PLACEMENT_EXAMPLE}")]


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    placement: Annotated[Any, Meta(description='a placement such as "0-3"')]
    node_group: Any = None


@dataclass(frozen=True)
class ComponentRule:
    """One entry of ``component_placement``: the placement of the components that the entry names."""

    components: tuple[str, ...]  # the names before the colon, which share the rule
    node_groups: tuple[str, ...]  # labels of the groups whose resources the ranks run through, in order
    placement: str  # not parsed yet
    path: str  # config path of the entry
    maybe_sexagesimal: bool = False  # True if the placement is a number from 60 up, perhaps written a:b without quotes


def parse_component_placement(value: Any, path: str) -> tuple[ComponentRule, ...]:
    """Return the rules of a ``component_placement`` mapping, in the order of the mapping. *path* is its config path,
    for errors. Raise ConfigError if a component has two rules.
    """
    entries: dict[Any, Any] = convert(value, _PlacementForm, path)
    rules = tuple(_parse_rule(key, spec, join(path, key)) for key, spec in entries.items())
    owner: dict[str, ComponentRule] = {}
    for rule in rules:
        for name in rule.components:
            if name in owner:
                raise ConfigError(f"component {name!r} has a rule already at {owner[name].path}", path=rule.path)
            owner[name] = rule
    return rules


def _parse_rule(key: Any, spec: Any, path: str) -> ComponentRule:
    refuse_sexagesimal(key, path)
    names = tuple(name.strip() for name in str(key).split(","))
    if isinstance(key, bool) or key is None or not all(names):
        raise ConfigError(f"{key!r} is no list of component names such as actor or actor,rollout", path=path)
    groups: tuple[str, ...] = (CLUSTER_GROUP,)
    value, where = spec, path
    if isinstance(spec, Mapping):
        rule = convert(spec, _Rule, path)
        if rule.node_group is not None:
            groups = parse_labels(rule.node_group, join(path, "node_group"))
        value, where = rule.placement, join(path, "placement")
    refuse_sexagesimal(value, where)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f'is {value!r}; a placement is a rank or a string such as "0-3" or "0-1:0-7"', path=where)
    return ComponentRule(names, groups, str(value), path, isinstance(value, int) and value >= 60)
