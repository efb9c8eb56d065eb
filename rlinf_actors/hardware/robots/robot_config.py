"""RobotConfig, the base of robots' config classes: checks the fields, and lists what the robot's node has to check."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.identity import address_identities
from rlinf_actors.model.hardware import HardwareConfig
from rlinf_actors.wire.values import Identity

if TYPE_CHECKING:
    from typing_extensions import Self

CAMERA_TYPES = ("realsense", "zed", "lumos")
"""Kinds of cameras that robot_checks can find."""

_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?$")
_MAX_INTERFACE_NAME = 15
"""linux/if.h: IFNAMSIZ less the terminating zero."""


@dataclass(frozen=True)
class TcpPort:
    """A TCP port that has to answer when the robot's node checks the robot's configuration."""

    field: str  # field of the configuration that gives the address
    host: str  # IP address or host name
    port: int
    must_listen: bool = False  # False if a refused connection counts as an answer of the host


@dataclass(frozen=True)
class CameraSet:
    """Cameras of one kind that have to be connected when the robot's node checks the robot's configuration."""

    field: str  # field of the configuration that lists the cameras
    kind: str  # one of CAMERA_TYPES
    serials: Sequence[str] | None  # None for all connected cameras of the kind


@dataclass
class RobotConfig(HardwareConfig):
    """Base class of the configurations of robots.

    A field that is not given gets its value from an environment variable of the robot's node, if one is set
    (RobotAutoConfig). An instance remembers which fields were given, so that the environment does not replace a given
    value that equals the default.

    Attributes:
        disable_validate: True if the node checks no address, camera, interface or device.
    """

    disable_validate: bool = False

    REQUIRED: ClassVar[tuple[str, ...]] = ()
    """Fields that need a value for each robot, from the configuration or from the node's environment."""

    FREE_TEXT: ClassVar[frozenset[str]] = frozenset()
    """Fields that may hold any text, although the same field of other robots is limited to certain values."""

    _given: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance that remembers which fields the caller has given."""
        self = super().__new__(cls)
        names = [spec.name for spec in dataclasses.fields(cls)]
        vars(self)["_given"] = frozenset((*names[: len(args)], *kwargs))
        return self

    def __post_init__(self) -> None:
        """Check and normalize every field. Raises ConfigError, whose ``path`` is the field."""
        for spec in dataclasses.fields(self):
            rule = _text if spec.name in self.FREE_TEXT else _RULES.get(_bare(spec.name))
            value = getattr(self, spec.name)
            if rule is not None and value is not None and value != "":
                setattr(self, spec.name, _checked(value, rule, spec.name))

    def as_values(self) -> dict[str, Any]:
        """Return the given fields as plain values. Fields that were not given are left out."""
        return {name: value for name, value in super().as_values().items() if name in self._given}

    def lacks(self, name: str) -> bool:
        """True if the field *name* was not given, or was given as None or ""."""
        return name not in self._given or getattr(self, name) in (None, "")

    def required(self) -> Sequence[str]:
        """Return the fields of REQUIRED that this robot needs."""
        return self.REQUIRED

    def variant(self) -> Sequence[str]:
        """Return the maker's name of the robot's variant, which becomes part of the model; [] without variants."""
        return []

    def identities(self, path: str = "") -> list[Identity]:
        """Return what tells the robot from all others; by default a node has one robot of the type.

        Resolves names. Raise ConfigError, whose path begins with *path*, for a name without an address.
        """
        return [Identity(type(self).__name__.removesuffix("Config"), self.node_rank)]

    def _at(self, host: str, path: str, node_rank: int, port: int | None = None) -> list[Identity]:
        """Return the identities of what node *node_rank* reaches at *host*."""
        here, required = node_rank == self.node_rank, not self.disable_validate
        return address_identities(host, node_rank, port, path=path, here=here, required=required)

    def _driver(self, side: str = "") -> int:
        """Return the cluster rank of the node that drives the arm. *side* is the prefix of the arm's fields."""
        rank: int | None = getattr(self, f"{side}controller_node_rank")
        return self.node_rank if rank is None else rank

    def missing(self) -> Mapping[str, str]:
        """Return the fields that are not given although the value of another field requires them.

        Each field is mapped to a text with the reason.
        """
        return {}

    def links(self) -> list[TcpPort]:
        """Return the TCP ports that have to answer when the robot's node checks the configuration."""
        return []

    def cameras(self) -> list[CameraSet]:
        """Return the cameras that have to be connected to the robot's node.

        The field camera_serials lists them, and camera_type has their kind.
        """
        return [
            CameraSet(spec.name, self._kind(spec.name.replace("serials", "type")), getattr(self, spec.name))
            for spec in dataclasses.fields(self)
            if _bare(spec.name) == "camera_serials"
        ]

    def _kind(self, field: str) -> str:
        return str(getattr(self, field, None) or getattr(self, "camera_type", CAMERA_TYPES[0]))

    def can_interfaces(self) -> Mapping[str, str]:
        """Return a mapping of field names to the CAN interfaces that have to be up on the robot's node."""
        return {}

    def devices(self) -> Mapping[str, str]:
        """Return a mapping of field names to the device files that have to exist on the robot's node."""
        return {}


def host_of(address: str) -> str:
    """Return the host in an address or URL, such as ``[::1]:80`` or ``http://arm.local/x``, else raise ValueError."""
    found = urlsplit(address if "://" in address else f"//{address}").hostname
    if not found:
        raise ValueError(f"{address!r} names no host")
    return found


def port_of(address: str) -> int | None:
    """Return the TCP port in an address or URL; None if there is none."""
    return urlsplit(address if "://" in address else f"//{address}").port


# --- checks of fields, by the field names without left_, right_ and base_ ---


def _bare(name: str) -> str:
    return re.sub(r"^(left|right|base)_(?=robot_|camera_|gripper_|controller_|arm_port|lead_port)", "", name)


def _address(value: Any, field: str) -> str:
    text = _text(value, field)
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        # text of digits and dots only was meant as an IPv4 address
        if re.fullmatch(r"[0-9.]+", text) or not _HOST_NAME.match(text):
            raise ConfigError(f"is {text!r}; it must be an IP address or a host name", path=field) from None
    return text


def _url(value: Any, field: str) -> str:
    text = _text(value, field)
    try:
        _address(host_of(text), field)
        port_of(text)
    except ValueError as error:  # ConfigError is one
        raise ConfigError(
            f"is {text!r}; it must be a host, host:port or URL such as http://10.0.0.5:8000"
            + ("" if isinstance(error, ConfigError) else f" ({error})"),
            path=field,
        ) from None
    return text


def _serials(value: Any, field: str) -> list[str]:
    if isinstance(value, (str, int)):
        raise ConfigError(f"is {value!r}; it must be a list of serial numbers: [{str(value)!r}]", path=field)
    serials = [str(item).strip() for item in value]
    for index, serial in enumerate(serials):
        if not serial:
            raise ConfigError("is empty; it must be a serial number", path=f"{field}[{index}]")
        if serial in serials[:index]:
            raise ConfigError(f"names camera {serial} twice", path=f"{field}[{index}]")
    return serials


def _interface(value: Any, field: str) -> str:
    text = _text(value, field)
    if len(text.encode()) > _MAX_INTERFACE_NAME or re.search(r"[\s/:]", text):
        raise ConfigError(f"is {text!r}; it must be the name of a network interface, such as can0", path=field)
    return text


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"is {value!r}; it must be text", path=field)
    return value.strip()


def _checked(value: Any, rule: Any, field: str) -> Any:
    """Return *value* if *rule* allows it, else raise ConfigError, whose ``path`` is *field*.

    A rule is the type bool, a range of numbers, a tuple of allowed texts, or a function that checks the value and
    converts it.
    """
    if rule is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"is {value!r}; it must be true or false", path=field)
    elif isinstance(rule, range):
        if isinstance(value, bool) or not isinstance(value, int) or value not in rule:
            raise ConfigError(f"is {value!r}; it must be a whole number from {rule[0]} to {rule[-1]}", path=field)
    elif isinstance(rule, tuple):
        if value not in rule:
            raise ConfigError(f"is {value!r}; it must be one of {', '.join(rule)}", path=field)
    else:
        return rule(value, field)
    return value


_RULES = {
    "robot_ip": _address,
    "robot_url": _url,
    "camera_serials": _serials,
    "camera_type": CAMERA_TYPES,
    "gripper_type": ("franka", "robotiq"),
    "gripper_connection": _text,
    "controller_node_rank": range(2**31),
    "node_rank": range(2**31),
    "can_interface": _interface,
    "arm_variant": _text,
    "enable_gripper": bool,
    "disable_validate": bool,
    "arm_port": range(1, 65536),
    "lead_port": range(1, 65536),
}
