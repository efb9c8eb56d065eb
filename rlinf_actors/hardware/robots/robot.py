"""Robot: how the built-in types are found on their node."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.registry import Hardware
from rlinf_actors.hardware.robots.auto import RobotAutoConfig
from rlinf_actors.hardware.robots.cameras import connected
from rlinf_actors.hardware.robots.robot_checks import Machine, faults_of
from rlinf_actors.hardware.robots.robot_config import CameraSet, RobotConfig
from rlinf_actors.model.hardware import HardwareInfo, HardwareResource

MACHINE = Machine()


class Robot(Hardware):
    """Base of the built-in types of robots.

    Attributes:
        CONFIG: the class of their configurations.
        INFO: the class of what a worker gets: type, model and config.
    """

    CONFIG: ClassVar[type[RobotConfig]]
    INFO: ClassVar[Callable[..., HardwareInfo]]

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
        """The robots of this machine: what *configs* describe, completed by the environment, and checked.

        Blocks while addresses are tried (2 s at most) and a camera maker's SDK looks for its cameras.

        Args:
            node_rank: cluster rank of this machine.
            configs: the configuration's entries; those of other nodes are passed over. None, or none for this node:
                what the environment alone names.

        Raises:
            ConfigError: a value is missing or cannot be, or a robot that is to be validated is not as configured; all
                faults of all robots are named.
        """
        return cls.on_machine(node_rank, configs, os.environ, MACHINE)

    @classmethod
    def on_machine(
        cls, node_rank: int, configs: Sequence[Any] | None, environ: Mapping[str, str], machine: Machine
    ) -> HardwareResource | None:
        """As `enumerate`, for a given environment and machine."""
        auto = RobotAutoConfig.from_environ(cls.CONFIG, environ)
        given = [config for config in configs or () if config.node_rank == node_rank]
        if given:
            filled = auto.fill(given)
        elif configs:
            return None  # the configuration names robots, and none here
        else:
            filled = auto.robots(node_rank)
        faults = [
            *_shared(filled),
            *(
                f"configs[{index}].{fault.field} {fault.text}"
                for index, config in enumerate(filled)
                if not config.disable_validate
                for fault in faults_of(config, machine)
            ),
        ]
        if faults:
            raise ConfigError(
                f"{cls.HW_TYPE} on node {node_rank} is not as configured (disable_validate: true skips these checks):"
                + "".join(f"\n  {fault}" for fault in faults)
            )
        infos = [cls.INFO(cls.HW_TYPE, cls.model_of(config), _with_cameras(config, machine)) for config in filled]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None

    @classmethod
    def model_of(cls, config: RobotConfig) -> str:
        """The model of one robot."""
        return cls.HW_TYPE


def _shared(configs: Sequence[RobotConfig]) -> list[str]:
    """Cameras that two robots of one node would have, by name or because neither names its own. Pure."""
    found: list[str] = []
    owners: dict[tuple[str, str], tuple[int, str]] = {}
    for index, config in enumerate(configs):
        for cameras in [] if config.disable_validate else config.cameras():
            where = f"configs[{index}].{cameras.field}"
            for serial in ["any"] if cameras.serials is None else cameras.serials:
                owner, earlier = owners.setdefault((cameras.kind, serial), (index, where))
                if owner == index:
                    continue
                said = f"names {serial}, as does {earlier}"
                if cameras.serials is None:
                    said = f"is not given, nor is {earlier}: both would have all {cameras.kind} cameras"
                found.append(f"{where} {said}; give each robot of a node its own (an empty list for none)")
    return found


def _with_cameras(config: RobotConfig, machine: Machine) -> RobotConfig:
    """*config* with the cameras that are connected where it names none; none where nothing is to be checked."""
    open_sets: list[CameraSet] = [cameras for cameras in config.cameras() if cameras.serials is None]
    if not open_sets:
        return config
    there: dict[str, Any] = {
        cameras.field: [] if config.disable_validate else list(connected(cameras.kind, machine.sys).serials)
        for cameras in open_sets
    }
    return dataclasses.replace(config, **there)
