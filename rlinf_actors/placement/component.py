"""ComponentPlacement: the ``component_placement`` section of a configuration, applied to a cluster."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rlinf_actors.config.cluster_config import SECTION, ClusterConfig, cluster_section
from rlinf_actors.config.component_rules import PLACEMENT_EXAMPLE, ComponentRule, parse_component_placement
from rlinf_actors.conversion import nearest
from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.placement.grammar import assign, names_all, rank_map
from rlinf_actors.placement.node_groups import ClusterView
from rlinf_actors.placement.resolver import ResourceTable, place
from rlinf_actors.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PlacementStrategy
from rlinf_actors.shown import html_table

T = TypeVar("T")


class PlacementMode(str, enum.Enum):
    """How far the components of a configuration share resources."""

    COLLOCATED = "collocated"
    """All components share the same resources."""
    DISAGGREGATED = "disaggregated"
    """No resource belongs to two components."""
    HYBRID = "hybrid"
    """Some resources belong to several components, but not all components share the same resources."""


class _Resolved:
    def __init__(self, rule: ComponentRule, cluster: ClusterView) -> None:
        self.rule = rule
        try:
            table = ResourceTable.of(cluster, rule.node_groups)
            every = range(len(table.resources))
            ranks: Sequence[int] = table.offered if names_all(rule.placement) else every
            target = msgspec.structs.replace(table.target, count=len(ranks))
            held = assign(rule.placement, target, rule.maybe_sexagesimal)
            assignment = [[ranks[number] for number in one] for one in held]
            place(assignment, table)  # a process that spans two nodes is a fault of the rule, so say it here
        except PlacementError as error:
            raise PlacementError(f"{rule.path}: {error}") from error
        self.world_size = len(assignment)
        found = rank_map(rule.placement, target, rule.maybe_sexagesimal)
        self.rank_map = {tuple(ranks[number] for number in part): processes for part, processes in found.items()}
        self.identities = {table.resources[rank].identity for ranks in assignment for rank in ranks}
        self.strategy: PlacementStrategy
        if all(group.counts_nodes for group in table.groups):
            self.strategy = NodePlacementStrategy([ranks[0] for ranks in assignment], rule.node_groups)
        else:
            self.strategy = FlexiblePlacementStrategy(assignment, rule.node_groups)


class ComponentPlacement:
    """Where the workers of each component run: the ``component_placement`` section of a configuration, on one cluster.

    A script gives the strategy of a component (`get_strategy`) to the launch of the component's group. An instance
    pickles, so it can be an argument of a worker.

    A subclass may replace entries of ``_placements`` (the strategy of each component), read ``_component_rank_map``
    (for each component, resource ranks to process ranks) and ``_config``, and set ``_placement_mode``.
    """

    def __init__(self, config: Any, cluster: ClusterView) -> None:
        """Read the rules of ``component_placement`` and check them against *cluster*.

        Args:
            config: a whole configuration or its ``cluster:`` section: a mapping, an OmegaConf DictConfig, the path of a
                YAML file, or a ClusterConfig. Only ``component_placement`` is read.
            cluster: the cluster to place on: a Cluster or a DescribedCluster.

        Raises:
            ConfigError: there is no ``component_placement``, or an entry is not valid.
            PlacementError: a placement breaks a rule or does not fit the cluster; the message begins with its config
                path.
        """
        self._config = config
        self._placement_mode: Any = None
        self._placements: dict[str, PlacementStrategy] = {}
        self._component_rank_map: dict[str, dict[tuple[int, ...], list[int]]] = {}
        self._component_world_size: dict[str, int] = {}
        self._rules: dict[str, ComponentRule] = {}
        self._identities: dict[str, frozenset[tuple[int, str, int]]] = {}
        for rule in _rules(config):
            resolved = _Resolved(rule, cluster)
            for name in rule.components:
                self._placements[name] = resolved.strategy
                self._component_rank_map[name] = resolved.rank_map
                self._component_world_size[name] = resolved.world_size
                self._rules[name] = rule
                self._identities[name] = frozenset(resolved.identities)

    def _repr_html_(self) -> str:
        rows = [(name, self.get_rule(name).placement, self.get_world_size(name)) for name in self.components]
        title = f"ComponentPlacement, {self.placement_mode.value}"
        return html_table(title, ("component", "placement", "workers"), rows)

    @property
    def components(self) -> list[str]:
        """The names of the components, in the order of the configuration."""
        return list(self._rules)

    @property
    def _components(self) -> list[str]:
        return self.components

    @property
    def placement_mode(self) -> Any:
        """The mode that a subclass has set; else a PlacementMode.

        COLLOCATED if all components use the same resources, DISAGGREGATED if no two share any, else HYBRID.
        """
        if self._placement_mode is not None:
            return self._placement_mode
        sets = list(self._identities.values())
        if all(each == sets[0] for each in sets):
            return PlacementMode.COLLOCATED
        if sum(map(len, sets)) == len(set().union(*sets)):
            return PlacementMode.DISAGGREGATED
        return PlacementMode.HYBRID

    @placement_mode.setter
    def placement_mode(self, mode: Any) -> None:
        self._placement_mode = mode

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the placement strategy of a component. Components of one rule have the same strategy.

        Raises:
            PlacementError: there is no such component.
        """
        return self._find(self._placements, component_name)

    def get_world_size(self, component_name: str) -> int:
        """Return the number of workers of a component.

        Raises:
            PlacementError: there is no such component.
        """
        return self._find(self._component_world_size, component_name)

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Return the ranks of the resources that a component uses, in ascending order.

        The ranks count the resources of the node groups that the component's rule names.

        Raises:
            PlacementError: there is no such component.
        """
        return [rank for ranks in self._find(self._component_rank_map, component_name) for rank in ranks]

    def get_rule(self, component_name: str) -> ComponentRule:
        """Return the rule of ``component_placement`` that places a component.

        Raises:
            PlacementError: there is no such component.
        """
        return self._find(self._rules, component_name)

    def _find(self, table: Mapping[str, T], name: str) -> T:
        try:
            return table[name]
        except KeyError:
            known = self.components
            raise PlacementError(
                f"there is no component {name!r}; did you mean {nearest(name, known)!r}? Components: {', '.join(known)}"
            ) from None


def _rules(config: Any) -> tuple[ComponentRule, ...]:
    path = f"{SECTION}.component_placement"
    if isinstance(config, ClusterConfig):
        rules = config.component_placement
    else:
        section = cluster_section(config)
        rules = parse_component_placement(section.get("component_placement") or {}, path)
        meant = difflib.get_close_matches("component_placement", map(str, section), n=1, cutoff=0.8)
        if not rules and meant and meant != ["component_placement"]:
            raise ConfigError("unknown key; did you mean 'component_placement'?", path=f"{SECTION}.{meant[0]}")
    if not rules:
        raise ConfigError(f"there is no component_placement; add one, e.g. {PLACEMENT_EXAMPLE}", path=path)
    return rules
