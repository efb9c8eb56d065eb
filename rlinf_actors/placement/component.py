"""ComponentPlacement: the ``component_placement`` section of a configuration, applied to a cluster."""

from __future__ import annotations

import difflib
import enum
from typing import Any

from rlinf_actors.config.cluster_config import (
    PLACEMENT_EXAMPLE,
    SECTION,
    ClusterConfig,
    ComponentRule,
    cluster_section,
    parse_component_placement,
)
from rlinf_actors.conversion import nearest
from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.model.node import NODE_GROUP
from rlinf_actors.placement.grammar import assign
from rlinf_actors.placement.node_groups import ClusterView
from rlinf_actors.placement.resolver import ResourceTable, place
from rlinf_actors.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PlacementStrategy


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
            self.assignment = assign(rule.placement, table.target, rule.maybe_sexagesimal)
            place(self.assignment, table)  # a process that spans two nodes is a fault of the rule, so say it here
        except PlacementError as error:
            raise PlacementError(f"{rule.path}: {error}") from error
        self.ranks = sorted({rank for ranks in self.assignment for rank in ranks})
        self.identities = {table.resources[rank].identity for rank in self.ranks}
        self.strategy: PlacementStrategy
        if rule.node_groups == (NODE_GROUP,):
            self.strategy = NodePlacementStrategy([ranks[0] for ranks in self.assignment], NODE_GROUP)
        else:
            self.strategy = FlexiblePlacementStrategy(self.assignment, rule.node_groups)


class ComponentPlacement:
    """Where the workers of each component run: the ``component_placement`` section of a configuration, on one cluster.

    A script gives the strategy of a component (`get_strategy`) to the launch of the component's group.
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
        self._resolved: dict[str, _Resolved] = {}
        for rule in _rules(config):
            resolved = _Resolved(rule, cluster)
            for name in rule.components:
                self._resolved[name] = resolved

    @property
    def components(self) -> list[str]:
        """The names of the components, in the order of the configuration."""
        return list(self._resolved)

    @property
    def placement_mode(self) -> PlacementMode:
        """COLLOCATED if all components use the same resources, DISAGGREGATED if no two share any, else HYBRID."""
        sets = [resolved.identities for resolved in self._resolved.values()]
        if all(each == sets[0] for each in sets):
            return PlacementMode.COLLOCATED
        if sum(map(len, sets)) == len(set().union(*sets)):
            return PlacementMode.DISAGGREGATED
        return PlacementMode.HYBRID

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the placement strategy of a component. Components of one rule have the same strategy.

        Raises:
            PlacementError: there is no such component.
        """
        return self._get(component_name).strategy

    def get_world_size(self, component_name: str) -> int:
        """Return the number of workers of a component.

        Raises:
            PlacementError: there is no such component.
        """
        return len(self._get(component_name).assignment)

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Return the ranks of the resources that a component uses, in ascending order.

        The ranks count the resources of the node groups that the component's rule names.

        Raises:
            PlacementError: there is no such component.
        """
        return list(self._get(component_name).ranks)

    def get_rule(self, component_name: str) -> ComponentRule:
        """Return the rule of ``component_placement`` that places a component.

        Raises:
            PlacementError: there is no such component.
        """
        return self._get(component_name).rule

    def _get(self, name: str) -> _Resolved:
        try:
            return self._resolved[name]
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
