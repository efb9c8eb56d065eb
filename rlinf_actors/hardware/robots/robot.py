"""Robot, the base of the built-in robot types, and RobotAutoConfig, which reads robots from environment variables.

The variable of a field is the field's name in upper case: ``ROBOT_IP``, ``CAMERA_SERIALS``, ``CAN_INTERFACE``. A comma
separates the values of different robots. In a field that holds a list, such as camera serials, the commas give each
robot one item; if the node has one robot, it gets all items. Semicolons separate robots that have several items each.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from rlinf_actors.config.config_values import build, convert
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.registry import Hardware
from rlinf_actors.hardware.robots.robot_checks import CheckedMachine, connected, faults_of
from rlinf_actors.hardware.robots.robot_config import RobotConfig
from rlinf_actors.model.hardware import HardwareInfo, HardwareResource

_Config = TypeVar("_Config", bound=RobotConfig)

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class RobotAutoConfig:
    """The values that a node's environment variables give for the configuration fields of one robot type. Pure.

    `fill` completes robots of the configuration; if the configuration has no robots, `robots` returns those that the
    variables describe.
    """

    kind: type[RobotConfig]  # config class of the type
    values: Mapping[str, Sequence[Any]]  # field to one value for each robot, or one value for all

    @classmethod
    def from_environ(cls, kind: type[RobotConfig], environ: Mapping[str, str]) -> RobotAutoConfig:
        """Return the values of the variables in *environ* that belong to fields of config class *kind*.

        Empty variables count as not set. Raise ConfigError if a value is not valid for its field; ``path`` is the name
        of the variable.
        """
        hints = typing.get_type_hints(kind)
        values: dict[str, Sequence[Any]] = {}
        for spec in dataclasses.fields(kind):
            text = environ.get(spec.name.upper(), "").strip()
            if text and spec.name != "node_rank":
                values[spec.name] = _read(text, hints[spec.name], spec.name.upper())
        return cls(kind, values)

    def robots(self, node_rank: int) -> list[RobotConfig]:
        """Return the robots that the environment variables alone describe; [] if no required field has a variable.

        Raise ConfigError if only some required fields have a variable, a variable has the wrong number of values, or a
        value is not valid.
        """
        named = [name for name in self.kind.REQUIRED if name in self.values]
        if named and len(named) < len(self.kind.REQUIRED):
            lacking = next(name for name in self.kind.REQUIRED if name not in self.values)
            raise ConfigError(f"is not set on node {node_rank}, but {named[0].upper()} is", path=lacking.upper())
        count = min((len(self.values.get(name, ())) for name in self.kind.REQUIRED), default=1)
        return self.fill([self.kind(node_rank=node_rank) for _ in range(count)])

    def fill(self, given: Sequence[_Config]) -> list[_Config]:
        """Return copies of robots' configurations, in which environment variables set the fields that were left out.

        Raise ConfigError if a required field was left out and has no variable, a variable has the wrong number of
        values, or a value is not valid.
        """
        filled = [config.as_values() for config in given]
        for spec in dataclasses.fields(self.kind):
            name = spec.name
            lacking = [index for index, config in enumerate(given) if config.lacks(name)]
            for index, value in zip(lacking, self._share(name, lacking, len(given)), strict=True):
                if value is not None:
                    filled[index][name] = value
        for index, (config, values) in enumerate(zip(given, filled, strict=True)):
            values["node_rank"] = config.node_rank
            for name in config.required():
                if not values.get(name) and not getattr(config, name):
                    raise ConfigError(
                        f"is not given: give it in configs, or set {name.upper()} in the environment of node "
                        f"{config.node_rank}",
                        path=f"configs[{index}].{name}",
                    )
        return [build(self.kind, values, f"configs[{index}]") for index, values in enumerate(filled)]

    def _share(self, name: str, lacking: Sequence[int], robots: int) -> Sequence[Any]:
        """Return a value of field *name* for each robot in *lacking*, from the field's environment variable.

        *lacking* has the indices of the robots that do not have the field; *robots* is the number of all robots of the
        node. The values are None if the variable is not set.
        """
        values = self.values.get(name, ())
        if not values or not lacking:
            return [None] * len(lacking)
        if isinstance(values[0], list) and len(values) == 1 and len(values[0]) == robots:
            values = [[item] for item in values[0]]  # written with commas only: an item for each robot
        if len(values) == robots:
            return [values[index] for index in lacking]
        if len(values) == len(lacking):
            return values
        own = name in self.kind.REQUIRED or name.endswith("gripper_connection") or isinstance(values[0], list)
        if len(values) == 1 and not own:
            return [values[0]] * len(lacking)
        several = "; lists of several items are separated by semicolons" if isinstance(values[0], list) else ""
        count = len(values[0]) if isinstance(values[0], list) and len(values) == 1 else len(values)
        raise ConfigError(
            f"has {count} value{'s' * (count > 1)}, and {len(lacking)} "
            f"robot{'s' * (len(lacking) > 1)} of the node take theirs from it; give comma-separated values, one for "
            f"each{several}",
            path=name.upper(),
        )


def _read(text: str, hint: Any, path: str) -> Sequence[Any]:
    if any(typing.get_origin(part) is list for part in (hint, *typing.get_args(hint))):
        robots = [[item.strip() for item in robot.split(",") if item.strip()] for robot in text.split(";")]
        if not all(robots):
            raise ConfigError("has a robot without any entry; leave out what is not to be set", path=path)
        return robots
    values = [part.strip() for part in text.split(",")]
    if not all(values):
        raise ConfigError("has an empty value between commas", path=path)
    if hint is not bool:
        return [convert(value, hint, path) for value in values]
    for value in values:
        if value.lower() not in _FLAGS:
            raise ConfigError(f"is {value!r}; it must be true or false", path=path)
    return [_FLAGS[value.lower()] for value in values]


class Robot(Hardware):
    """Base class of the built-in robot types, with the `enumerate` that all of them use.

    Attributes:
        CONFIG: config class of the type.
        INFO: HardwareInfo class of the type, with the fields type, model and config.
    """

    CONFIG: ClassVar[type[RobotConfig]]
    INFO: ClassVar[Callable[..., HardwareInfo]]

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
        """Return the robots of this machine, after a check that each robot is connected as configured.

        The robots are those in *configs*; environment variables give their missing fields. Blocks while addresses are
        tried (2 s at most) and while a camera maker's SDK searches for cameras.

        Args:
            node_rank: cluster rank of this machine.
            configs: entries of the configuration; entries for other nodes are skipped. If it is None or [], the
                robots are those that the environment variables alone describe.

        Raises:
            ConfigError: a value is missing or not valid, or a robot is not as configured (with
                ``disable_validate``, this is not checked); the message lists the faults of all robots.
        """
        return cls.on_machine(node_rank, configs, os.environ, CheckedMachine())

    @classmethod
    def on_machine(
        cls, node_rank: int, configs: Sequence[Any] | None, environ: Mapping[str, str], machine: CheckedMachine
    ) -> HardwareResource | None:
        auto = RobotAutoConfig.from_environ(cls.CONFIG, environ)
        given = [config for config in configs or () if config.node_rank == node_rank]
        if given:
            filled = auto.fill(given)
        elif configs:
            return None  # all configured robots are on other nodes
        else:
            filled = auto.robots(node_rank)
        identities = [config.identities(f"configs[{index}].") for index, config in enumerate(filled)]
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
        infos = [
            cls.INFO(cls.HW_TYPE, "_".join([cls.HW_TYPE, *config.variant()]), _with_cameras(config, machine))
            for config in filled
        ]
        for info, known in zip(infos, identities, strict=True):
            info.identities = known
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


def _shared(configs: Sequence[RobotConfig]) -> list[str]:
    """Return a sentence for each camera that two robots would share.

    Two robots would share a camera if both list its serial number, or if neither lists cameras: each robot would then
    use all connected cameras.
    """
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


def _with_cameras(config: RobotConfig, machine: CheckedMachine) -> RobotConfig:
    """Return *config*, with the serial numbers of the connected cameras in each camera field that is None.

    If ``disable_validate`` is set, such a field becomes [], and no camera is searched.
    """
    there: dict[str, Any] = {
        cameras.field: [] if config.disable_validate else list(connected(cameras.kind, machine.sys).serials)
        for cameras in config.cameras()
        if cameras.serials is None
    }
    return dataclasses.replace(config, **there) if there else config
