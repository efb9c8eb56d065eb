"""ClusterConfig: the ``cluster:`` section, checked and in one normal form.

Every fault is a ConfigError that carries its config path. Nothing a caller passes in is changed.

The ``component_placement`` part: which components go by which rule.

The ``hardware`` part of a node group: one registered type and its configs.

Which types there are is not known here: callers pass the registry's table, name to config dataclass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_actors.config.config_values import (
    build,
    check_keys,
    flag,
    join,
    label_text,
    mapping,
    nearest,
    parse_env_vars,
    parse_node_ranks,
    plain,
    refuse_sexagesimal,
    sequence,
    text,
    whole_number,
)
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import AcceleratorType, is_accelerator_type
from rlinf_actors.model.node import CLUSTER_GROUP, RESERVED_LABELS, NodeEnvConfig

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


_EXAMPLE = "{type: Franka, configs: [{node_rank: 0, robot_ip: 10.10.10.1}]}"


@dataclass(frozen=True)
class HardwareSection:
    """What a node group owns.

    Attributes:
        type: the registered type, e.g. ``Franka``.
        configs: one entry a piece of hardware: instances of the type's dataclass, or plain mappings
            where no table of types was given. Each has ``node_rank``.
        node_ranks: the node of each entry.
    """

    type: str
    configs: tuple[Any, ...] = ()
    node_ranks: tuple[int, ...] = ()

    def for_node(self, node_rank: int) -> list[Any]:
        """The entries for one node, in order."""
        return [config for config, rank in zip(self.configs, self.node_ranks, strict=True) if rank == node_rank]


def parse_hardware(
    value: Any, label: str, group_ranks: Sequence[int], types: Mapping[str, type] | None, path: str
) -> HardwareSection | None:
    """Check a ``hardware`` section; None if there is none.

    Raises:
        ConfigError: unknown type or key, a node outside the group, or the type refuses the values.
    """
    if value is None:
        return None
    section = mapping(value, path, _EXAMPLE)
    check_keys(section, ("type", "configs"), path)
    if "type" not in section:
        raise ConfigError(f"has no type; it looks like {_EXAMPLE}", path=path)
    kind = text(section["type"], f"{path}.type", "the name of a registered hardware type")
    _check_type(kind, types, f"{path}.type")
    configs: list[Any] = []
    ranks: list[int] = []
    entries = section.get("configs")
    for index, raw in enumerate(sequence([] if entries is None else entries, f"{path}.configs", "[{node_rank: 0}]")):
        where = f"{path}.configs[{index}]"
        entry = mapping(raw, where, "{node_rank: 0}")
        if "node_rank" not in entry:
            raise ConfigError("has no node_rank; say which node of the group it is attached to", path=where)
        rank = whole_number(entry["node_rank"], f"{where}.node_rank")
        if rank not in group_ranks:
            raise ConfigError(
                f"is {rank}, which is not in group {label!r} (its nodes: {', '.join(map(str, group_ranks))})",
                path=f"{where}.node_rank",
            )
        config = dict(entry, node_rank=rank)
        configs.append(config if types is None else build(types[kind], config, where))
        ranks.append(rank)
    return HardwareSection(kind, tuple(configs), tuple(ranks))


def _check_type(kind: str, types: Mapping[str, type] | None, path: str) -> None:
    if is_accelerator_type(kind) or kind in (AcceleratorType.NO_ACCEL.value, "Accelerator"):
        raise ConfigError(
            f"{kind!r} is a type of accelerator: those are found by themselves, so leave the hardware section out",
            path=path,
        )
    if types is not None and kind not in types:
        known = ", ".join(sorted(types)) or "none"
        hint = f"did you mean {nearest(kind, types)!r}? " if types else ""
        raise ConfigError(
            f"there is no hardware type {kind!r}; {hint}Known types: {known}. "
            "A type of your own is registered by an installed package, or by the module that RLINF_EXT_MODULE names",
            path=path,
        )


SECTION = "cluster"
_CLUSTER_KEYS = ("num_nodes", "component_placement", "node_groups")
_GROUP_KEYS = ("label", "node_ranks", "env_configs", "hardware", "ignore_hardware")
_ENV_KEYS = ("node_ranks", "python_interpreter_path", "env_vars")
_GROUP_EXAMPLE = "{label: a800, node_ranks: 0-7}"

ConfigSource = Any
"""A mapping, an OmegaConf DictConfig, or the path of a YAML file (str or PathLike)."""


@dataclass(frozen=True)
class NodeGroupConfig:
    """One entry of ``node_groups``.

    Attributes:
        label: its name; unique.
        node_ranks: cluster ranks of its nodes, ascending.
        env_configs: interpreters and variables, for nodes of the group, no node in two of them.
        hardware: the non-accelerator type that the group owns, if any.
        ignore_hardware: whether its nodes count as CPU-only.
    """

    label: str
    node_ranks: tuple[int, ...]
    env_configs: tuple[NodeEnvConfig, ...] = ()
    hardware: HardwareSection | None = None
    ignore_hardware: bool = False

    @classmethod
    def from_any(
        cls,
        source: ConfigSource,
        *,
        num_nodes: int,
        hardware_types: Mapping[str, type] | None = None,
        path: str = "node_group",
    ) -> NodeGroupConfig:
        """Check one group of a cluster of *num_nodes* nodes; see :meth:`ClusterConfig.from_any`.

        Raises:
            ConfigError: a key or value is wrong.
        """
        section = mapping(_load(source, path), path, _GROUP_EXAMPLE)
        check_keys(section, _GROUP_KEYS, path)
        for key in ("label", "node_ranks"):
            if key not in section:
                raise ConfigError(f"has no {key}; a node group looks like {_GROUP_EXAMPLE}", path=path)
        label = label_text(section["label"], f"{path}.label")
        if label in RESERVED_LABELS:
            raise ConfigError(
                f"{label!r} is the built-in group of all nodes; choose another label for this one", path=f"{path}.label"
            )
        ranks = parse_node_ranks(section["node_ranks"], num_nodes, f"{path}.node_ranks")
        ignore = flag(section.get("ignore_hardware", False), f"{path}.ignore_hardware")
        hardware = parse_hardware(section.get("hardware"), label, ranks, hardware_types, f"{path}.hardware")
        if ignore and hardware is not None:
            raise ConfigError(
                "ignore_hardware and hardware exclude one another: a group that owns hardware cannot ignore it",
                path=f"{path}.ignore_hardware",
            )
        env_configs = _env_configs(section.get("env_configs"), label, ranks, num_nodes, f"{path}.env_configs")
        return cls(label, ranks, env_configs, hardware, ignore)


@dataclass(frozen=True)
class ClusterConfig:
    """The ``cluster:`` section.

    Attributes:
        num_nodes: how many nodes the cluster has.
        component_placement: which components go by which rule; see ComponentPlacement.
        node_groups: the groups, in the order given.
    """

    num_nodes: int
    component_placement: tuple[ComponentRule, ...] = ()
    node_groups: tuple[NodeGroupConfig, ...] = ()

    @classmethod
    def from_any(
        cls,
        source: ConfigSource,
        *,
        num_nodes: int | None = None,
        hardware_types: Mapping[str, type] | None = None,
    ) -> ClusterConfig:
        """Check a configuration: the ``cluster:`` section itself, or a whole one that has it.

        Args:
            source: a mapping, an OmegaConf DictConfig or the path of a YAML file; a ClusterConfig is returned as it is.
            num_nodes: stands in for a missing ``num_nodes`` key; must agree with one that is there.
            hardware_types: registered hardware types, name to config dataclass. With it, every entry of
                ``hardware.configs`` becomes an instance; without it they stay mappings, and types are not checked.

        Raises:
            ConfigError: a key or value is wrong; its ``path`` says which.
        """
        if isinstance(source, cls):
            return source
        section = cluster_section(source)
        check_keys(section, _CLUSTER_KEYS, SECTION)
        count = _num_nodes(section, num_nodes)
        rules: tuple[ComponentRule, ...] = ()
        if section.get("component_placement") is not None:
            rules = parse_component_placement(section["component_placement"], f"{SECTION}.component_placement")
        groups: list[NodeGroupConfig] = []
        path = f"{SECTION}.node_groups"
        entries = section.get("node_groups")
        for index, entry in enumerate(sequence([] if entries is None else entries, path, f"[{_GROUP_EXAMPLE}]")):
            where = f"{path}[{index}]"
            group = NodeGroupConfig.from_any(
                mapping(entry, where, _GROUP_EXAMPLE), num_nodes=count, hardware_types=hardware_types, path=where
            )
            for other, earlier in enumerate(groups):
                if earlier.label == group.label:
                    raise ConfigError(f"{group.label!r} is the label of {path}[{other}] too", path=f"{where}.label")
                _check_owned_once(earlier, group, f"{where}.hardware")
            groups.append(group)
        _check_labels(rules, [group.label for group in groups])
        return cls(count, rules, tuple(groups))

    from_dict_cfg = from_any

    def get_node_labels(self, node_rank: int) -> list[str]:
        """Labels of the configured groups that hold a node."""
        return [group.label for group in self.node_groups if node_rank in group.node_ranks]

    def get_hardware_configs(self, node_rank: int) -> dict[str, list[Any]]:
        """Hardware type to the entries of ``hardware.configs`` for a node; types without an entry for it too."""
        found: dict[str, list[Any]] = {}
        for group in self.node_groups:
            if group.hardware is not None and node_rank in group.node_ranks:
                found.setdefault(group.hardware.type, []).extend(group.hardware.for_node(node_rank))
        return found


def _check_owned_once(earlier: NodeGroupConfig, group: NodeGroupConfig, path: str) -> None:
    """A node has its pieces of one type in one order, which one group numbers."""
    if earlier.hardware is None or group.hardware is None or earlier.hardware.type != group.hardware.type:
        return
    both = sorted({*earlier.node_ranks} & {*group.node_ranks})
    if both:
        raise ConfigError(
            f"group {earlier.label!r} owns {group.hardware.type} on node {both[0]} too: list all of a node's in one "
            "group, and tell them apart by their ranks in the placement",
            path=path,
        )


def cluster_section(source: ConfigSource) -> Mapping[Any, Any]:
    """The plain ``cluster:`` section of *source*, which is that section or a whole configuration.

    Of a whole OmegaConf configuration only that section is resolved.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    loaded = source
    if isinstance(source, (str, os.PathLike)):
        loaded = _load_yaml(source)
    if not isinstance(loaded, Mapping):  # a DictConfig is one
        raise ConfigError(
            f"is {loaded!r}; it must be a mapping, an OmegaConf DictConfig or the path of a YAML file", path=SECTION
        )
    if SECTION in loaded:
        loaded = _member(loaded)
    return mapping(plain(loaded, SECTION), SECTION, "{num_nodes: 1}")


def _member(whole: Any) -> Any:
    try:
        return whole[SECTION]
    except (ConfigError, KeyError):
        raise
    except Exception as error:  # OmegaConf's own, which may not be imported here
        raise ConfigError(f"cannot be resolved: {error}", path=SECTION) from error


def _load(source: ConfigSource, path: str) -> Any:
    return plain(_load_yaml(source) if isinstance(source, (str, os.PathLike)) else source, path)


def _num_nodes(section: Mapping[Any, Any], given: int | None) -> int:
    path = f"{SECTION}.num_nodes"
    if section.get("num_nodes") is None:
        if given is None:
            raise ConfigError("has no num_nodes; add the number of nodes, e.g. num_nodes: 1", path=SECTION)
        return whole_number(given, path, least=1)
    count = whole_number(section["num_nodes"], path, least=1)
    if given is not None and given != count:
        raise ConfigError(f"is {count}, but num_nodes={given} was asked for; give only one, or the same", path=path)
    return count


def _env_configs(
    value: Any, label: str, group_ranks: Sequence[int], num_nodes: int, path: str
) -> tuple[NodeEnvConfig, ...]:
    owner: dict[int, str] = {}
    found: list[NodeEnvConfig] = []
    example = "[{node_ranks: 0-7, env_vars: [{NAME: value}]}]"
    for index, raw in enumerate(sequence([] if value is None else value, path, example)):
        where = f"{path}[{index}]"
        entry = mapping(raw, where, example[1:-1])
        check_keys(entry, _ENV_KEYS, where)
        if "node_ranks" not in entry:
            raise ConfigError("has no node_ranks; say which nodes of the group it is for", path=where)
        ranks = parse_node_ranks(entry["node_ranks"], num_nodes, f"{where}.node_ranks")
        if _is_all(entry["node_ranks"]):
            ranks = tuple(group_ranks)
        for rank in ranks:
            if rank not in group_ranks:
                raise ConfigError(
                    f"names node {rank}, which is not in group {label!r} (its nodes: {spell_ranks(group_ranks)})",
                    path=f"{where}.node_ranks",
                )
            if rank in owner:
                raise ConfigError(
                    f"names node {rank}, which {owner[rank]} covers already; one entry per node",
                    path=f"{where}.node_ranks",
                )
            owner[rank] = where
        interpreter = entry.get("python_interpreter_path")
        if interpreter is not None:
            interpreter = text(interpreter, f"{where}.python_interpreter_path", "the path of an interpreter")
        found.append(NodeEnvConfig(ranks, interpreter, parse_env_vars(entry.get("env_vars"), join(where, "env_vars"))))
    return tuple(found)


def _is_all(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == "all"


def _check_labels(rules: Sequence[ComponentRule], labels: Sequence[str]) -> None:
    known = [*labels, *RESERVED_LABELS]
    for rule in rules:
        for label in rule.node_groups:
            if label not in known:
                raise ConfigError(
                    f"there is no node group {label!r}; did you mean {nearest(label, known)!r}? "
                    f"Groups: {', '.join(known)} (labels are case-sensitive)",
                    path=f"{rule.path}.node_group",
                )


def spell_ranks(ranks: Sequence[int]) -> str:
    """Ranks as people write them: ``0-3,5``."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(ranks)) or "none"


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    start: int | None = None
    previous = -1
    for rank in ranks:
        if start is None:
            start = rank
        elif rank != previous + 1:
            yield start, previous
            start = rank
        previous = rank
    if start is not None:
        yield start, previous


def _load_yaml(source: str | os.PathLike[str]) -> Any:
    from rlinf_actors.config.config_values import load_yaml  # not at the top: workers have no YAML, nor need it

    return load_yaml(source)
