"""Workers of test_every_error.py, and a robot that one group alone may move. For RLINF_EXT_MODULE too."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_actors import (
    Hardware,
    HardwareConfig,
    HardwareInfo,
    HardwareResource,
    NodeHardwareConfig,
    Worker,
)

CONFIG = {
    "num_nodes": 2,
    "node_groups": [{"label": "lab", "node_ranks": 0, "hardware": {"type": "OneArm", "configs": [{"node_rank": 0}]}}],
}


@NodeHardwareConfig.register_hardware_config("OneArm")
@dataclass
class OneArmConfig(HardwareConfig):
    pass


@Hardware.register()
class OneArm(Hardware):
    HW_TYPE = "OneArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[OneArmConfig] | None = None) -> HardwareResource | None:
        return HardwareResource(cls.HW_TYPE, [HardwareInfo(cls.HW_TYPE, "v1") for _ in configs or ()])


def register() -> None:
    """The import has done it."""


class Doer(Worker):
    def echo(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise ValueError("the method says no")

    def end(self) -> None:
        os._exit(3)

    def sleep(self) -> None:
        time.sleep(3600)

    def hear(self, group: str) -> Any:
        return self.recv(group, 0)

    def on_lease_lost(self) -> None: ...
