"""A user's hardware type that looks at its node, and does there what the node's environment says."""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlinf_actors import (
    ConfigError,
    Hardware,
    HardwareConfig,
    HardwareInfo,
    HardwareResource,
    NodeHardwareConfig,
    Worker,
)


class Grip(enum.Enum):
    TWO = "two"
    THREE = "three"


@dataclass
class Camera:
    serial: str
    size: tuple[int, int] = (640, 480)


@NodeHardwareConfig.register_hardware_config("LookingArm")
@dataclass
class LookingArmConfig(HardwareConfig):
    port: str = ""
    grip: Grip = Grip.TWO
    disable_validate: bool = False


@dataclass
class LookingArmInfo(HardwareInfo):
    config: LookingArmConfig
    camera: Camera
    seen: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        return self.config.port


def _misbehave(mode: str) -> HardwareResource | None:
    if mode == "abort":
        os.abort()
    elif mode == "exit":
        sys.exit(3)
    elif mode == "hang":
        marker = os.environ.get("ARM_PID_FILE")
        if marker:
            with open(marker, "w") as file:  # a pipe, where a test waits for us
                file.write(str(os.getpid()))
        time.sleep(3600)
    elif mode == "garbage":
        for fd in range(1, 16):
            try:
                os.write(fd, b"\xff garbage")
            except OSError:
                continue
    elif mode == "wrong":
        return ["an arm"]  # type: ignore[return-value]
    elif mode == "refuse":
        raise ConfigError("is not plugged in", path="configs[0].port")
    elif mode == "raise":
        raise OSError("no bus")
    elif mode == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    return None


@Hardware.register()
class LookingArm(Hardware):
    HW_TYPE = "LookingArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[LookingArmConfig] | None = None) -> HardwareResource | None:
        print("the SDK says hello")
        mode = os.environ.get("ARM_MODE", "")
        if mode:
            wrong = _misbehave(mode)
            if wrong is not None or mode != "garbage":
                return wrong
        if configs is None:
            ports = filter(None, os.environ.get("ARM_PORTS", "").split(","))
            configs = [LookingArmConfig(node_rank, port) for port in ports]
        seen = {"python": sys.executable, "nic": os.environ.get("ARM_NIC", ""), "pid": str(os.getpid())}
        infos = [
            LookingArmInfo(cls.HW_TYPE, f"v{node_rank}", dataclasses.replace(config), Camera("c1"), seen)
            for config in configs
        ]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


def register() -> None:
    """For RLINF_EXT_MODULE: the import has done it."""


def section(*configs: dict, node_ranks: object = "0-1", **more: object) -> dict:
    """A cluster of two nodes whose group owns these arms."""
    hardware = {"type": "LookingArm", **({"configs": list(configs)} if configs else {})}
    group = {"label": "lab", "node_ranks": node_ranks, "hardware": hardware, **more}
    return {"num_nodes": 2, "node_groups": [group]}


class Mover(Worker):
    def arms(self):
        return self.hardware_infos

    def arms_of_cluster(self):
        from rlinf_actors import Cluster

        return [Cluster().get_node_info(rank).get_hardware_infos("LookingArm") for rank in range(2)]
