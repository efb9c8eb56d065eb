"""ClusterConfig: the ``cluster:`` section of a configuration, checked and in one normal form.

A driver reads the section before it connects; `rlinf-actors plan` reads it too. The structs below define the keys and
the types of their values; rlinf_actors.conversion reports values that do not fit. Every fault is a ConfigError with its
config path. Callers pass the table of registered hardware types.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from rlinf_actors.config.component_rules import ComponentRule, parse_component_placement
from rlinf_actors.config.config_values import (
    build,
    is_all,
    label_text,
    load_yaml,
    parse_env_vars,
    parse_node_ranks,
    parse_requirements,
    plain,
    whole_number,
)
from rlinf_actors.config.net_emulation_config import NetEmulationConfig
from rlinf_actors.config.net_emulation_config import parse as parse_net_emulation
from rlinf_actors.config.profiling_config import ProfileConfig, parse_profiling
from rlinf_actors.config.small_sections import AutoSchedulerConfig, RuntimeConfig, TracerConfig
from rlinf_actors.conversion import convert, nearest
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import AcceleratorType, is_accelerator_type
from rlinf_actors.model.node import RESERVED_LABELS, NodeEnvConfig

T = TypeVar("T")

SECTION = "cluster"
_GROUP_EXAMPLE = "{label: a800, node_ranks: 0-7}"
_GROUP_RULE = "Each node yaml config must be a dictionary"
_VARIABLE_EXAMPLE = "{GLOO_SOCKET_IFNAME: eth0}"

ConfigSource = Any
"""A mapping, an OmegaConf DictConfig, or the path of a YAML file (str or PathLike)."""


# --- the keys, as files have them ---


def _mapping(example: str, rule: str = "") -> Any:
    return Meta(description=f"a mapping such as {example}" + (f". {rule}" if rule else ""))


def _list(example: str) -> Any:
    return Meta(description=f"a list such as [{example}]")


# The sentences that begin with a capital are those of RLinf, which its users search for.
_HardwareEntry = Annotated[dict[Any, Any], _mapping("{node_rank: 0}", "Each hardware config must be a dictionary")]
_Variable = Annotated[dict[Any, Any], _mapping(_VARIABLE_EXAMPLE, "Each node env_var must be a dict")]


class _Hardware(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(pattern=r"\S", description="the name of a registered hardware type")]
    configs: Annotated[list[_HardwareEntry], _list("{node_rank: 0}")] | None = None


class _Env(msgspec.Struct, forbid_unknown_fields=True):
    node_ranks: Any
    python_interpreter_path: Annotated[str, Meta(pattern=r"\S", description="the path of an interpreter")] | None = None
    env_vars: Annotated[list[_Variable], _list(_VARIABLE_EXAMPLE)] | None = None
    requirements: Any = None


_ENV_EXAMPLE = "{node_ranks: 0-7, env_vars: [{NAME: value}]}"
_HARDWARE_EXAMPLE = "{type: Franka, configs: [{node_rank: 0, robot_ip: 10.10.10.1}]}"


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    label: Any
    node_ranks: Any
    env_configs: Annotated[list[Annotated[_Env, _mapping(_ENV_EXAMPLE)]], _list(_ENV_EXAMPLE)] | None = None
    hardware: Annotated[_Hardware, _mapping(_HARDWARE_EXAMPLE)] | None = None
    ignore_hardware: bool = False


class _Cluster(msgspec.Struct, forbid_unknown_fields=True):
    num_nodes: Any = None
    component_placement: Any = None
    node_groups: (
        Annotated[list[Annotated[_Group, _mapping(_GROUP_EXAMPLE, _GROUP_RULE)]], _list(_GROUP_EXAMPLE)] | None
    ) = None
    # each of these has a dataclass of its own, which defines and checks the keys below it
    tracer: Annotated[dict[Any, Any], _mapping("{enable: true}")] | None = None
    profiling: Annotated[dict[Any, Any], _mapping("{backend: nsight, worker_groups: all}")] | None = None
    net_emulation: Annotated[dict[Any, Any], _mapping("{enabled: true, crossdc_pairs: []}")] | None = None
    runtime: Annotated[dict[Any, Any], _mapping("{working_dir: /home/me/project}")] | None = None
    auto_scheduler: bool | None = None
    use_pre_process_policy: bool | None = None
    use_wait_before_last_iter_policy: bool | None = None
    recreate_nccl_groups: bool | None = None


_SectionForm: Any = Annotated[dict[Any, Any], _mapping("{num_nodes: 1}")]
_GroupForm: Any = Annotated[_Group, _mapping(_GROUP_EXAMPLE)]


# --- node groups and their hardware ---


@dataclass(frozen=True)
class HardwareSection:
    """The ``hardware`` section of a node group: the robots or other hardware of one type that the group owns."""

    type: str  # the registered type, e.g. Franka
    configs: tuple[Any, ...] = ()  # an entry per piece: the type's dataclass, or mappings if no types were passed
    node_ranks: tuple[int, ...] = ()  # the node of each entry

    def for_node(self, node_rank: int) -> list[Any]:
        """Return the configurations of the hardware on one node, in the order of the section."""
        return [config for config, rank in zip(self.configs, self.node_ranks, strict=True) if rank == node_rank]


def _parse_hardware(
    section: _Hardware, label: str, group_ranks: Sequence[int], types: Mapping[str, type] | None, path: str
) -> HardwareSection:
    kind = section.type.strip()
    if is_accelerator_type(kind) or kind in (AcceleratorType.NO_ACCEL.value, "Accelerator"):
        raise ConfigError(
            f"{kind!r} is a type of accelerator: those are found by themselves, so leave the hardware section out",
            path=f"{path}.type",
        )
    if types is not None and kind not in types:
        hint = f"did you mean {nearest(kind, types)!r}? " if types else ""
        raise ConfigError(
            f"there is no hardware type {kind!r}; {hint}Known types: {', '.join(sorted(types)) or 'none'}. "
            "A type of your own is registered by an installed package, or by the module that RLINF_EXT_MODULE names. "
            f"Unsupported hardware type: {kind}",
            path=f"{path}.type",
        )
    configs: list[Any] = []
    ranks: list[int] = []
    for index, entry in enumerate(section.configs or ()):
        where = f"{path}.configs[{index}]"
        if "node_rank" not in entry:
            raise ConfigError(
                "has no node_rank; say which node of the group it is attached to. "
                "Missing fields '['node_rank']' detected",
                path=where,
            )
        rank = whole_number(entry["node_rank"], f"{where}.node_rank")
        if rank not in group_ranks:
            raise ConfigError(
                f"is {rank}, which is not in group {label!r} (its nodes: {', '.join(map(str, group_ranks))}). "
                "The rank must be within node_ranks of the group",
                path=f"{where}.node_rank",
            )
        if entry in section.configs[:index]:  # type: ignore[index]
            raise ConfigError(
                f"is equal to configs[{section.configs.index(entry)}], so both are the same piece; leave one out. "  # type: ignore[union-attr]
                "Duplicate hardware configs",
                path=where,
            )
        config = {**entry, "node_rank": rank}
        configs.append(config if types is None else build(types[kind], config, where))
        ranks.append(rank)
    return HardwareSection(kind, tuple(configs), tuple(ranks))


def _parse_env_configs(
    entries: Sequence[_Env], label: str, group_ranks: Sequence[int], num_nodes: int, path: str
) -> tuple[NodeEnvConfig, ...]:
    owner: dict[int, str] = {}
    found: list[NodeEnvConfig] = []
    for index, entry in enumerate(entries):
        where = f"{path}[{index}]"
        ranks = parse_node_ranks(entry.node_ranks, num_nodes, f"{where}.node_ranks")
        if is_all(entry.node_ranks):
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
        interpreter = entry.python_interpreter_path
        variables = parse_env_vars(entry.env_vars or (), f"{where}.env_vars")
        env_vars = [{name: value} for name, value in variables.items()]
        wanted = parse_requirements(entry.requirements, f"{where}.requirements")
        found.append(NodeEnvConfig(list(ranks), env_vars, interpreter.strip() if interpreter else None, wanted))
    return tuple(found)


@dataclass(frozen=True)
class NodeGroupConfig:
    """One entry of ``node_groups``: a label for some nodes, with their environment and hardware.

    Attributes:
        label: unique name of the group.
        node_ranks: cluster ranks of its nodes, ascending.
        env_configs: entries with interpreters and variables; each node of the group is in at most one entry.
        hardware: the hardware, other than accelerators, that the group owns.
        ignore_hardware: True if its nodes count as CPU-only.
    """

    label: str
    node_ranks: list[int]
    env_configs: tuple[NodeEnvConfig, ...] = ()
    hardware: HardwareSection | None = None
    ignore_hardware: bool = False

    @property
    def hardware_type(self) -> str | None:
        """The hardware type that the group owns; None if it owns none."""
        return None if self.hardware is None else self.hardware.type

    @classmethod
    def from_any(
        cls,
        source: ConfigSource,
        *,
        num_nodes: int,
        hardware_types: Mapping[str, type] | None = None,
        path: str = "node_group",
    ) -> NodeGroupConfig:
        """Return one checked entry of ``node_groups``.

        Args:
            source: a mapping, an OmegaConf DictConfig or the path of a YAML file.
            num_nodes: number of nodes in the cluster.
            hardware_types: config dataclass of each registered hardware type; None if types are not to be checked.
            path: config path of the entry, for errors.

        Raises:
            ConfigError: a key or value is wrong.
        """
        loaded = plain(load_yaml(source) if isinstance(source, (str, os.PathLike)) else source, path)
        return cls._of(convert(loaded, _GroupForm, path), num_nodes, hardware_types, path)

    @classmethod
    def _of(
        cls, section: _Group, num_nodes: int, hardware_types: Mapping[str, type] | None, path: str
    ) -> NodeGroupConfig:
        label = label_text(section.label, f"{path}.label")
        if label in RESERVED_LABELS:
            raise ConfigError(
                f"{label!r} is the built-in group of all nodes, so the label is reserved; choose another one",
                path=f"{path}.label",
            )
        ranks = parse_node_ranks(section.node_ranks, num_nodes, f"{path}.node_ranks")
        hardware = None
        if section.hardware is not None:
            hardware = _parse_hardware(section.hardware, label, ranks, hardware_types, f"{path}.hardware")
        if section.ignore_hardware and hardware is not None:
            raise ConfigError(
                "ignore_hardware and hardware exclude one another: a group that owns hardware cannot ignore it",
                path=f"{path}.ignore_hardware",
            )
        env_configs = _parse_env_configs(section.env_configs or (), label, ranks, num_nodes, f"{path}.env_configs")
        return cls(label, list(ranks), env_configs, hardware, section.ignore_hardware)


@dataclass(frozen=True)
class ClusterConfig:
    """The ``cluster:`` section of a configuration, checked.

    Attributes:
        num_nodes: number of nodes in the cluster.
        component_placement: rules that place components; see ComponentPlacement.
        node_groups: the groups, in the order of the configuration.
        tracer: the ``tracer`` section; None without one, as in the next three.
        profiling: the ``profiling`` section.
        net_emulation: the ``net_emulation`` section.
        runtime: the ``runtime`` section.
        scheduling: the keys ``auto_scheduler``, ``use_pre_process_policy``, ``use_wait_before_last_iter_policy`` and
            ``recreate_nccl_groups``.
    """

    num_nodes: int
    component_placement: tuple[ComponentRule, ...] = ()
    node_groups: tuple[NodeGroupConfig, ...] = ()
    tracer: TracerConfig | None = None
    profiling: ProfileConfig | None = None
    net_emulation: NetEmulationConfig | None = None
    runtime: RuntimeConfig | None = None
    scheduling: AutoSchedulerConfig = field(default_factory=AutoSchedulerConfig)

    @classmethod
    def from_any(
        cls, source: ConfigSource, *, num_nodes: int | None = None, hardware_types: Mapping[str, type] | None = None
    ) -> ClusterConfig:
        """Return the checked configuration of *source*: a ``cluster:`` section, or a whole configuration that has one.

        Args:
            source: a mapping, an OmegaConf DictConfig or the path of a YAML file; a ClusterConfig is returned
                unchanged.
            num_nodes: number of nodes. If the section has a ``num_nodes`` too, the two must be equal.
            hardware_types: config dataclass of each registered hardware type. With it, every entry of
                ``hardware.configs`` becomes an instance; without it, entries stay mappings and types are not checked.

        Raises:
            ConfigError: a key or value is wrong; ``path`` says which.
        """
        if isinstance(source, cls):
            return source
        section = convert(cluster_section(source), _Cluster, SECTION)
        count = _num_nodes(section.num_nodes, num_nodes)
        rules: tuple[ComponentRule, ...] = ()
        if section.component_placement is not None:
            rules = parse_component_placement(section.component_placement, f"{SECTION}.component_placement")
        groups: list[NodeGroupConfig] = []
        path = f"{SECTION}.node_groups"
        for index, entry in enumerate(section.node_groups or ()):
            where = f"{path}[{index}]"
            group = NodeGroupConfig._of(entry, count, hardware_types, where)
            for other, earlier in enumerate(groups):
                if earlier.label == group.label:
                    raise ConfigError(f"{group.label!r} is the label of {path}[{other}] too", path=f"{where}.label")
                _check_owned_once(earlier, group, f"{where}.hardware")
            groups.append(group)
        _check_labels(rules, [group.label for group in groups])
        return cls(
            count,
            rules,
            tuple(groups),
            tracer=_subsection(section, "tracer", TracerConfig),
            profiling=None if section.profiling is None else parse_profiling(section.profiling, f"{SECTION}.profiling"),
            net_emulation=_net_emulation(section, rules, count),
            runtime=_subsection(section, "runtime", RuntimeConfig),
            scheduling=_scheduling(section),
        )

    @classmethod
    def from_dict_cfg(cls, cfg_dict: ConfigSource) -> ClusterConfig:
        """Return the checked configuration of *cfg_dict*, as `from_any` with all hardware types of this process.

        Raises:
            ConfigError: a key or value is wrong; ``path`` says which.
        """
        # by name, since this package is below the one with the types, and daemons read configurations without them
        registry = importlib.import_module("rlinf_actors.hardware.registry")
        return cls.from_any(cfg_dict, hardware_types=registry.hardware_types())

    def get_node_labels(self, node_rank: int) -> list[str]:
        """Return the labels of the configured node groups that contain the node with this rank."""
        return [group.label for group in self.node_groups if node_rank in group.node_ranks]

    get_node_labels_by_rank = get_node_labels

    def get_node_python_interpreter_path_by_rank(self, node_rank: int) -> list[str]:
        """Return the interpreters that the groups of the node with this rank name for it."""
        entries = [entry for group in self.node_groups for entry in group.env_configs if node_rank in entry.node_ranks]
        return [entry.python_interpreter_path for entry in entries if entry.python_interpreter_path is not None]

    def get_node_hw_configs_by_rank(self, node_rank: int) -> list[Any]:
        """Return the entries of ``hardware.configs`` for the node with this rank."""
        return [config for configs in self.get_hardware_configs(node_rank).values() for config in configs]

    def get_hardware_configs(self, node_rank: int) -> dict[str, list[Any]]:
        """Return the entries of ``hardware.configs`` for the node with this rank, in a list for each hardware type. A
        type has an empty list if a group of the node owns such hardware, but none of it is on the node.
        """
        found: dict[str, list[Any]] = {}
        for group in self.node_groups:
            if group.hardware is not None and node_rank in group.node_ranks:
                found.setdefault(group.hardware.type, []).extend(group.hardware.for_node(node_rank))
        return found


def cluster_section(source: ConfigSource) -> Mapping[Any, Any]:
    """Return the ``cluster:`` section in *source* as plain values. *source* is that section, or a whole configuration
    that contains it.

    If *source* is a whole OmegaConf configuration, only the interpolations in the section are resolved.
    """
    loaded = load_yaml(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(loaded, Mapping):  # an OmegaConf DictConfig is a Mapping
        raise ConfigError(
            f"is {loaded!r}; it must be a mapping, an OmegaConf DictConfig or the path of a YAML file", path=SECTION
        )
    if SECTION in loaded:
        try:
            loaded = loaded[SECTION]
        except (ConfigError, KeyError):
            raise
        except Exception as error:  # OmegaConf's own, which may not be imported here
            raise ConfigError(f"cannot be resolved: {error}", path=SECTION) from error
    section: dict[Any, Any] = convert(plain(loaded, SECTION), _SectionForm, SECTION)
    return section


def _num_nodes(value: Any, given: int | None) -> int:
    path = f"{SECTION}.num_nodes"
    if value is None:
        if given is None:
            raise ConfigError("has no num_nodes; add the number of nodes, e.g. num_nodes: 1", path=SECTION)
        return whole_number(given, path, least=1)
    try:
        count = whole_number(value, path, least=1)
    except ConfigError as error:
        raise ConfigError(f"{error.args[0]}. 'num_nodes' must be a positive integer", path=path) from None
    if given is not None and given != count:
        raise ConfigError(f"is {count}, but num_nodes={given} was asked for; give only one, or the same", path=path)
    return count


def _subsection(section: _Cluster, key: str, kind: type[T]) -> T | None:
    """Return the section under *key* as an instance of the dataclass *kind*, None if the configuration has none."""
    values = getattr(section, key)
    return None if values is None else cast(T, build(kind, values, f"{SECTION}.{key}"))


def _net_emulation(section: _Cluster, rules: Sequence[ComponentRule], num_nodes: int) -> NetEmulationConfig | None:
    components = [component for rule in rules for component in rule.components]
    values = section.net_emulation
    return None if values is None else parse_net_emulation(values, f"{SECTION}.net_emulation", components, num_nodes)


def _scheduling(section: _Cluster) -> AutoSchedulerConfig:
    given = {each.name: getattr(section, each.name) for each in fields(AutoSchedulerConfig)}
    return AutoSchedulerConfig(**{key: value for key, value in given.items() if value is not None})


def _check_owned_once(earlier: NodeGroupConfig, group: NodeGroupConfig, path: str) -> None:
    # One group numbers the pieces of one type on a node: two groups would give the same piece two ranks.
    if earlier.hardware is None or group.hardware is None or earlier.hardware.type != group.hardware.type:
        return
    both = sorted({*earlier.node_ranks} & {*group.node_ranks})
    if both:
        raise ConfigError(
            f"group {earlier.label!r} owns {group.hardware.type} on node {both[0]} too: list all of a node's in one "
            "group, and tell them apart by their ranks in the placement. "
            "Cannot have multiple hardware configs of one type for a node in different groups",
            path=path,
        )


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
    """Return ascending ranks in a short form for people, such as ``0-3,5``. Return "none" if there is no rank."""
    # consecutive ranks have the same difference to their position
    groups = itertools.groupby(enumerate(ranks), lambda item: item[1] - item[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
