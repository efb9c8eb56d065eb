"""NetEmulationConfig: the ``cluster.net_emulation`` section.

An endpoint is ``Env:0`` (a worker), ``Env:0-3`` or ``Env:0,2`` (workers), ``Env`` or ``Env:all`` (all workers of a
group), ``node:0-1`` (all workers on nodes) or ``driver``. Upper and lower case, and ``Group`` at the end of a group's
name, make no difference: ``Env``, ``env`` and ``EnvGroup`` are one group.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlinf_actors.config.config_values import build, plain
from rlinf_actors.conversion import nearest
from rlinf_actors.errors import ConfigError
from rlinf_actors.plurals import counted
from rlinf_actors.settings import NET_EMULATION

NODE = "node"
"""Name of the endpoints that stand for all workers on a node."""
DRIVER = "driver"
ALL = "*"
"""Rank of an endpoint that stands for all ranks."""
_LARGEST_RANK = 1 << 20


@dataclass(frozen=True)
class CrossDCPair:
    """The emulated path from one endpoint to another.

    Attributes:
        src: the sender, ``group:rank``; rank ``*`` for all ranks.
        dst: the receiver.
        delay_ms: latency in milliseconds, in this direction.
        jitter_ms: largest random deviation from the latency, in milliseconds. The order of messages stays.
        bandwidth_mbps: bandwidth of this path in megabits a second, beside that of bandwidth groups; None for no limit.
        loss: probability that a message is lost on its way, each time that it is sent.
        retransmit_ms: time after which a lost message is sent again; None for 200 ms, or twice the latency if that is
            longer.
    """

    src: str
    dst: str
    delay_ms: float
    jitter_ms: float = 0.0
    bandwidth_mbps: float | None = None
    loss: float = 0.0
    retransmit_ms: float | None = None


@dataclass(frozen=True)
class BandwidthGroup:
    """Endpoints that share one emulated bandwidth in each direction."""

    members: tuple[str, ...]
    bandwidth_mbps: float


@dataclass(frozen=True)
class PairSection:
    """An entry of ``crossdc_pairs`` as it is written."""

    src: str | list[str]
    dst: str | list[str]
    delay_ms: float
    jitter_ms: float = 0.0
    bandwidth_mbps: float | None = None
    loss: float = 0.0
    retransmit_ms: float | None = None


@dataclass(frozen=True)
class GroupSection:
    """An entry of ``bandwidth_groups`` as it is written."""

    members: str | list[str]
    bandwidth_mbps: float


@dataclass(frozen=True)
class _Section:
    enabled: bool = False
    symmetric: bool = True
    crossdc_pairs: list[PairSection] = field(default_factory=list)
    bandwidth_groups: list[GroupSection] = field(default_factory=list)
    seed: int = 0


@dataclass(frozen=True)
class NetEmulationConfig:
    """The ``net_emulation`` section of a cluster's configuration.

    Attributes:
        enabled: True if the job emulates a network.
        symmetric: True if each pair is also a path in the opposite direction.
        crossdc_pairs: the paths; if two of them are for the same endpoints, the last one counts.
        bandwidth_groups: the bandwidths that several endpoints share.
        seed: seed of jitter and loss. Each path has its own sequence.
        values: the section as it was given, as plain values.
    """

    enabled: bool = False
    symmetric: bool = True
    crossdc_pairs: tuple[CrossDCPair, ...] = ()
    bandwidth_groups: tuple[BandwidthGroup, ...] = ()
    seed: int = 0
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_cfg(cls, cfg: Any) -> NetEmulationConfig | None:
        """Return the section *cfg*, a mapping or an OmegaConf DictConfig; None if it is None or not enabled.

        Raises:
            ConfigError: a value is not valid.
        """
        if cfg is None:
            return None
        found = parse(plain(cfg, "net_emulation"), "net_emulation")
        return found if found.enabled else None

    def environment_for(self, group: str, world_size: int) -> dict[str, str]:
        """Return the environment variables by which workers of *group* get this configuration; none if not enabled.

        Raises:
            ConfigError: this configuration names a rank that the group does not have, since it has *world_size*.
        """
        check_group(self, group, world_size)
        return {NET_EMULATION: msgspec.json.encode(self.values).decode()} if self.enabled else {}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> NetEmulationConfig | None:
        """Return the configuration that `environment_for` has put into *environ*, None without one."""
        text = environ.get(NET_EMULATION)
        return cls.from_cfg(msgspec.json.decode(text)) if text else None


def parse(
    values: Mapping[Any, Any], path: str, components: Collection[str] = (), num_nodes: int | None = None
) -> NetEmulationConfig:
    """Return the section *values*, after checking it.

    Args:
        values: plain values.
        path: config path of the section.
        components: names of the configuration's components. An endpoint whose name is almost that of a component is an
            error. Other names are not, because a group may be launched by any name.
        num_nodes: number of nodes, None if unknown.

    Raises:
        ConfigError: a key is unknown, or a value is not valid.
    """
    section: _Section = build(_Section, values, path)
    pairs = []
    for index, pair in enumerate(section.crossdc_pairs):
        where = f"{path}.crossdc_pairs[{index}]"
        _check_pair(pair, where)
        ends = [_endpoints(getattr(pair, key), f"{where}.{key}", components, num_nodes) for key in ("src", "dst")]
        rest = {key: getattr(pair, key) for key in ("jitter_ms", "bandwidth_mbps", "loss", "retransmit_ms")}
        pairs += [CrossDCPair(src, dst, pair.delay_ms, **rest) for src in ends[0] for dst in ends[1]]
    groups, owner = [], dict[str, int]()
    for index, group in enumerate(section.bandwidth_groups):
        where = f"{path}.bandwidth_groups[{index}]"
        _check(group.bandwidth_mbps, f"{where}.bandwidth_mbps", "a number of megabits a second above 0", above=True)
        members = _endpoints(group.members, f"{where}.members", components, num_nodes)
        for member in members:
            if owner.setdefault(normal(member), index) != index:
                earlier = f"bandwidth_groups[{owner[normal(member)]}]"
                raise ConfigError(f"{member} is in {earlier} already: an endpoint has one bandwidth", path=where)
        groups.append(BandwidthGroup(members, group.bandwidth_mbps))
    return NetEmulationConfig(section.enabled, section.symmetric, tuple(pairs), tuple(groups), section.seed, values)


def normal(endpoint: str) -> str:
    """Return the form of *endpoint* by which endpoints are compared: lower case, without ``Group`` after the name."""
    name, _, rank = endpoint.partition(":")
    return f"{_plain_name(name)}:{rank or ALL}"


def _plain_name(name: str) -> str:
    name = name.lower()
    return name.removesuffix("group") or name


def check_group(config: NetEmulationConfig, group: str, world_size: int) -> None:
    """Check the endpoints of *config* that name *group*, which is launched with *world_size* ranks.

    Raises:
        ConfigError: an endpoint has a rank that the group does not have.
    """
    name = _plain_name(group)
    named = [(pair.src, "crossdc_pairs") for pair in config.crossdc_pairs]
    named += [(pair.dst, "crossdc_pairs") for pair in config.crossdc_pairs]
    named += [(member, "bandwidth_groups") for each in config.bandwidth_groups for member in each.members]
    for endpoint, key in named:
        of, _, rank = normal(endpoint).partition(":")
        if of == name and rank != ALL and int(rank) >= world_size:
            raise ConfigError(
                f"has {endpoint}, but group {group!r} is launched with {counted(world_size, 'rank')}, "
                f"so its last rank is {world_size - 1}",
                path=f"cluster.net_emulation.{key}",
            )


def _endpoints(value: Any, path: str, components: Collection[str], num_nodes: int | None) -> tuple[str, ...]:
    """Return the endpoints in *value*, each with one rank."""
    items = [value] if isinstance(value, str) else value
    if not items:
        raise ConfigError("is empty; it must name endpoints, such as ['Env:0-3']", path=path)
    found: list[str] = []
    for index, item in enumerate(items):
        where = path if isinstance(value, str) else f"{path}[{index}]"
        name, colon, ranks = item.partition(":")
        name = name.strip()
        if not name or (colon and not ranks.strip()):
            raise ConfigError(f"is {item!r}; it must be GROUP:RANKS, such as Env:0-3 or node:1", path=where)
        _check_name(name, where, components)
        if _plain_name(name) == DRIVER and colon:
            raise ConfigError(f"is {item!r}; the driver has no ranks: write {DRIVER}", path=where)
        for rank in _ranks(ranks, where):
            if _plain_name(name) == NODE and num_nodes is not None and rank != ALL and int(rank) >= num_nodes:
                raise ConfigError(f"has node {rank}, but the cluster has {counted(num_nodes, 'node')}", path=where)
            found.append(f"{name}:{rank}")
    return tuple(dict.fromkeys(found))


def _ranks(text: str, path: str) -> list[str]:
    if not text or text.strip().lower() in ("all", ALL):
        return [ALL]
    ranks: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _LARGEST_RANK:
            raise ConfigError(
                f"has the ranks {text!r}; they must be ranks and ranges, such as 0-3,5, or all", path=path
            )
        ranks += [str(rank) for rank in range(first, last + 1)]
    return ranks


def _check_name(name: str, path: str, components: Collection[str]) -> None:
    """Raise ConfigError if *name* looks like a misspelt component: similar to one, and not another number of it."""
    known = {_plain_name(component): component for component in (*components, NODE, DRIVER)}
    stem = _plain_name(name)
    if not components or stem in known or any(_stem(stem) == _stem(other) for other in known):
        return
    if difflib.get_close_matches(stem, known, n=1, cutoff=0.6):
        raise ConfigError(
            f"names {name!r}, which is no component; did you mean {known[nearest(stem, known)]!r}? "
            f"Components: {', '.join(components)}",
            path=path,
        )


def _stem(name: str) -> str:
    """Return *name* without what tells apart names of one kind: numbers, separators and a plural."""
    return re.sub(r"[\d_\-. ]+", "", name).removesuffix("s")


def _check_pair(pair: PairSection, path: str) -> None:
    _check(pair.delay_ms, f"{path}.delay_ms", "a number of milliseconds from 0 up")
    _check(pair.jitter_ms, f"{path}.jitter_ms", "a number of milliseconds from 0 up")
    _check(pair.bandwidth_mbps, f"{path}.bandwidth_mbps", "a number of megabits a second above 0", above=True)
    _check(pair.retransmit_ms, f"{path}.retransmit_ms", "a number of milliseconds from 0 up")
    if not 0 <= pair.loss < 1:
        raise ConfigError(f"is {pair.loss}; it must be a probability from 0 to below 1", path=f"{path}.loss")


def _check(value: float | None, path: str, wanted: str, *, above: bool = False) -> None:
    if value is not None and (not math.isfinite(value) or value < 0 or (above and value == 0)):
        raise ConfigError(f"is {value}; it must be {wanted}", path=path)
