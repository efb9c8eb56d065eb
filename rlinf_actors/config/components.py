"""The ``component_placement`` part: which components go by which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_actors.config.fields import check_keys, join, label_text, mapping, refuse_sexagesimal
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.node import CLUSTER_GROUP

EXAMPLE = "{actor: 0-7, env: {node_group: franka, placement: 0-1}}"


@dataclass(frozen=True)
class ComponentRule:
    """One entry of ``component_placement``.

    Attributes:
        components: the names that share the rule, as written before the colon.
        node_groups: labels of the groups whose resources the ranks run through, in order.
        placement: the placement string, not parsed yet.
        path: config path of the entry.
        maybe_sexagesimal: the placement came as a ready number of 60 or more, so that it may have
            been written ``a:b`` without quotes.
    """

    components: tuple[str, ...]
    node_groups: tuple[str, ...]
    placement: str
    path: str
    maybe_sexagesimal: bool = False


def parse_component_placement(value: Any, path: str) -> tuple[ComponentRule, ...]:
    """The rules of a ``component_placement`` mapping, in its order.

    Raises:
        ConfigError: an entry has another shape, an unknown key, or a component has two rules.
    """
    rules = tuple(_rule(key, spec, path) for key, spec in mapping(value, path, EXAMPLE).items())
    owner: dict[str, ComponentRule] = {}
    for rule in rules:
        for name in rule.components:
            if name in owner:
                raise ConfigError(f"component {name!r} has a rule already at {owner[name].path}", path=rule.path)
            owner[name] = rule
    return rules


def _rule(key: Any, spec: Any, parent: str) -> ComponentRule:
    path = join(parent, key)
    refuse_sexagesimal(key, path)
    names = tuple(name.strip() for name in str(key).split(","))
    if isinstance(key, bool) or key is None or not all(names):
        raise ConfigError(f"{key!r} is no list of component names such as actor or actor,rollout", path=path)
    if not isinstance(spec, Mapping):
        written, hint = _placement_text(spec, path)
        return ComponentRule(names, (CLUSTER_GROUP,), written, path, hint)
    check_keys(spec, ("node_group", "placement"), path)
    if "placement" not in spec:
        raise ConfigError('has no placement; add one, e.g. placement: "0-3"', path=path)
    groups: tuple[str, ...] = (CLUSTER_GROUP,)
    if spec.get("node_group") is not None:
        groups = parse_labels(spec["node_group"], join(path, "node_group"))
    written, hint = _placement_text(spec["placement"], join(path, "placement"))
    return ComponentRule(names, groups, written, path, hint)


def parse_labels(value: Any, path: str) -> tuple[str, ...]:
    """Labels given as one label, ``"a,b"`` or a list.

    Raises:
        ConfigError: a label is no label, or given twice.
    """
    if isinstance(value, (list, tuple)):
        items = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
    elif isinstance(value, str):
        items = [(item, path) for item in value.split(",")]
    else:
        items = [(value, path)]
    labels = tuple(label_text(item, where) for item, where in items)
    if not labels:
        raise ConfigError("is an empty list; name at least one node group", path=path)
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise ConfigError(f"names node group {label!r} twice", path=path)
    return labels


def _placement_text(value: Any, path: str) -> tuple[str, bool]:
    refuse_sexagesimal(value, path)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f'is {value!r}; a placement is a rank or a string such as "0-3" or "0-1:0-7"', path=path)
    return str(value), isinstance(value, int) and value >= 60
