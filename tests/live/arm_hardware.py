"""A robot type for tests: an arm that one group alone may move, and workers for it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_actors import (
    FlexiblePlacementStrategy,
    Hardware,
    HardwareConfig,
    HardwareInfo,
    HardwareResource,
    NodeHardwareConfig,
    Worker,
)

ADDRESSES = ("10.9.0.1", "10.9.0.2")


@dataclass
class ArmInfo(HardwareInfo):
    address: str = ""

    @property
    def identity(self) -> str:
        return self.address


@NodeHardwareConfig.register_hardware_config("LeasedArm")
@dataclass
class ArmConfig(HardwareConfig):
    address: str = ""


@Hardware.register()
class LeasedArm(Hardware):
    HW_TYPE = "LeasedArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[ArmConfig] | None = None) -> HardwareResource | None:
        infos = [ArmInfo(cls.HW_TYPE, "v1", arm.address) for arm in configs or ()]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


@NodeHardwareConfig.register_hardware_config("BareArm")
@dataclass
class BareArmConfig(HardwareConfig):
    address: str = ""


@Hardware.register()
class BareArm(Hardware):
    """Does not say which arm is which."""

    HW_TYPE = "BareArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[BareArmConfig] | None = None) -> HardwareResource | None:
        infos = [HardwareInfo(cls.HW_TYPE, arm.address) for arm in configs or ()]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


def register() -> None:
    """For RLINF_EXT_MODULE: the import has done it."""


def owning(kind: str, *entries: dict) -> dict:
    """One node with the arms of these entries."""
    configs = [{"node_rank": 0, **entry} for entry in entries]
    lab = {"label": "lab", "node_ranks": 0, "hardware": {"type": kind, "configs": configs}}
    return {"num_nodes": 1, "node_groups": [lab]}


def config() -> dict:
    """Two nodes, the second with two arms."""
    arms = [{"node_rank": 1, "address": address} for address in ADDRESSES]
    lab = {"label": "lab", "node_ranks": 1, "hardware": {"type": "LeasedArm", "configs": arms}}
    return {"num_nodes": 2, "node_groups": [lab]}


def on(*arms: int) -> FlexiblePlacementStrategy:
    """One worker on each of these arms."""
    return FlexiblePlacementStrategy([[arm] for arm in arms], "lab")


class Mover(Worker):
    def where(self):
        return self.hardware_infos[0].address


class BadMover(Mover):
    def __init__(self):
        raise ValueError("no arm answers")


class StubbornMover(Mover):
    """Does not end at SIGTERM."""

    def __init__(self):
        super().__init__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
