"""NetEmulationConfig: the ``cluster.net_emulation`` section."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CrossDCPair:
    """The emulated delay from some workers to others. A worker is ``group:rank``, several are ``group:0-3``."""

    src: str | list[str]
    dst: str | list[str]
    delay_ms: float


@dataclass(frozen=True)
class BandwidthGroup:
    """Workers that share one emulated bandwidth."""

    members: str | list[str]
    bandwidth_mbps: float


@dataclass(frozen=True)
class NetEmulationConfig:
    """The ``net_emulation`` section of a cluster's configuration.

    Attributes:
        enabled: True if the job emulates a network.
        symmetric: True if each pair also delays the opposite direction.
        crossdc_pairs: the delays.
        bandwidth_groups: the bandwidths.
    """

    enabled: bool = False
    symmetric: bool = True
    crossdc_pairs: list[CrossDCPair] | None = None
    bandwidth_groups: list[BandwidthGroup] | None = None
