"""Make HardwareInfos of configured hardware (robots and other pieces that node groups own) from configuration entries.

The ``enumerate`` of a hardware type is user code and examines the machine, so it runs on the node in a child process
(`probe_child.enumerate_main`). In the driver it runs only for types that the script itself registers; in `rlinf-actors
plan`, for described nodes.

`piece_of` and `info_of` convert a HardwareInfo to a message and back. Dataclasses inside the info (mostly its config)
travel with their class names and become instances of the same class. Numbers, text, lists and mappings travel
unchanged, all other values as text. A class name in a message never leads to an import.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf_actors.config.config_values import build
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.extensions import is_known, load_types
from rlinf_actors.hardware.probe_report import ReportedInfo
from rlinf_actors.hardware.registry import hardware_classes, hardware_types, lookup
from rlinf_actors.model.hardware import HardwareConfig, HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.wire.values import Piece

if TYPE_CHECKING:
    from rlinf_actors.config.cluster_config import ClusterConfig, HardwareSection

DISABLE_VALIDATE = "disable_validate"
"""Field of a config dataclass: if it is True, ``enumerate`` does not examine the machine."""


_ENTRY = re.compile(r"\bconfigs\[(\d+)\]")


def values_of(section: HardwareSection, node_rank: int) -> list[dict[str, Any]] | None:
    """Return the entries of a hardware section for one node, as mappings of plain values to send to the node.

    If the section has no entries for any node, return None: ``enumerate`` then finds the pieces without configuration.
    If only other nodes have entries, return []: this node has no piece, and the caller need not query it.
    """
    if not section.configs:
        return None
    return [_values(config) for config in section.for_node(node_rank)]


def _values(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    values = config.as_values() if isinstance(config, HardwareConfig) else dataclasses.asdict(config)
    left_out = {spec.name for spec in dataclasses.fields(config) if not spec.init}
    return {name: value for name, value in values.items() if name not in left_out}


def without_types(config: ClusterConfig) -> ClusterConfig:
    """Return a copy of *config* in which plain mappings replace the config dataclasses of hardware types.

    Processes that do not know the hardware types can read such a copy.
    """
    groups = []
    for group in config.node_groups:
        section = group.hardware
        if section is not None:
            section = replace(section, configs=tuple(_values(entry) for entry in section.configs))
        groups.append(replace(group, hardware=section))
    return replace(config, node_groups=tuple(groups))


def describe_hardware(config: ClusterConfig, nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return copies of the described *nodes*, each with the hardware that the node groups of *config* own on it.

    ``enumerate`` of each hardware type finds that hardware in this process. If the config class has the field
    ``disable_validate``, that field is set to True, so that ``enumerate`` does not examine this machine. If a node
    lists hardware of a type already, no more of that type is added to it. Types that this process does not know are
    left out. Raise ConfigError if an entry is wrong, or ``enumerate`` refuses it.
    """
    load_types(group.hardware.type for group in config.node_groups if group.hardware is not None)
    found = {node.node_rank: list(node.hardware_resources) for node in nodes}
    listed = {node.node_rank: {resource.type for resource in node.hardware_resources} for node in nodes}
    for index, group in enumerate(config.node_groups):
        section = group.hardware
        if section is None or not is_known(section.type) or not hardware_classes(section.type):
            continue
        path = f"cluster.node_groups[{index}].hardware"
        for rank in group.node_ranks:
            if section.type in listed.get(rank, {section.type}):
                continue
            entries = values_of(section, rank)
            if entries == []:
                continue
            try:
                resource = enumerate_values(section.type, rank, entries, described=True)
            except ConfigError as error:
                raise section_error(error, section, rank, path) from None
            merge(found[rank], resource)
    return [replace(node, hardware_resources=found[node.node_rank]) for node in nodes]


def merge(resources: list[HardwareResource], found: HardwareResource | None) -> None:
    """Add *found* to the *resources* of a node, in place.

    A piece that is in *resources* already is not added again.
    """
    if found is None:
        return
    for index, resource in enumerate(resources):
        if resource.type == found.type:
            new = [info for info in found.infos if info not in resource.infos]
            resources[index] = replace(resource, infos=[*resource.infos, *new])
            return
    resources.append(found)


def section_error(
    error: ConfigError, section: HardwareSection, node_rank: int, path: str, where: str = ""
) -> ConfigError:
    """Return a copy of *error*, which the entries of one node caused, with indices into the whole hardware section.

    A node gets only its own entries, so its error says ``configs[0]`` for an entry that may be ``configs[3]`` of the
    section. *path* is the section's config path; *where* is appended to the error's text.
    """
    places = [index for index, rank in enumerate(section.node_ranks) if rank == node_rank]

    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"configs[{places[index] if index < len(places) else index}]"

    below = _ENTRY.sub(place, error.path)
    text = _ENTRY.sub(place, str(error.args[0])) + where
    if below.startswith("configs["):
        return ConfigError(text, path=f"{path}.{below}")
    return ConfigError(f"{below}: {text}" if below else text, path=path)


def enumerate_values(
    kind: str, node_rank: int, entries: Sequence[Mapping[str, Any]] | None, *, described: bool = False
) -> HardwareResource | None:
    """Return the pieces of one hardware type on a node, from configuration entries as plain values. Runs user code.

    Args:
        kind: the hardware type.
        node_rank: cluster rank of the node.
        entries: the entries for that node; None if the configuration has no entries for any node.
        described: True if the node's hardware is described, not real: then ``disable_validate`` is set if the config
            class has that field.

    Raises:
        ConfigError: an entry is wrong (its path begins with ``configs[INDEX]``), or `enumerate_type` raised it.
    """
    configs = []
    for index, entry in enumerate(entries or ()):
        values = dict(entry)
        if described and any(spec.name == DISABLE_VALIDATE for spec in dataclasses.fields(lookup(kind))):
            values[DISABLE_VALIDATE] = True
        configs.append(build(lookup(kind), values, f"configs[{index}]"))
    return enumerate_type(kind, node_rank, configs)


def enumerate_type(kind: str, node_rank: int, configs: Sequence[Any]) -> HardwareResource | None:
    """Return the pieces of one hardware type on a node; None if there are none.

    Calls ``enumerate`` of the type's class, which is user code. *configs* are the node's entries as instances of the
    config class. Raise ConfigError if the type has no Hardware class, or its ``enumerate`` raises an error or returns
    something else than a HardwareResource of that type.
    """
    classes = hardware_classes(kind)
    for cls in classes:
        try:
            found = cls.enumerate(node_rank, list(configs) or None)
        except ConfigError:
            raise
        except Exception as error:
            raised = f"{cls.__name__}.enumerate raised {type(error).__name__}"
            raise ConfigError(f"{raised} for node {node_rank}: {error}") from error
        if found is None:
            continue
        if not isinstance(found, HardwareResource) or not all(isinstance(info, HardwareInfo) for info in found.infos):
            raise ConfigError(
                f"{cls.__name__}.enumerate returned {found!r}; it must be a HardwareResource of HardwareInfos, or None"
            )
        if found.type == kind:
            return found if found.infos else None
        if cls.HW_TYPE:  # a class without one may have found another type's pieces
            raise ConfigError(f"{cls.__name__}.enumerate returned pieces of type {found.type!r}, not {kind!r}")
    if not classes:
        raise ConfigError(
            f"hardware type {kind!r} has no Hardware class: register one that has HW_TYPE = {kind!r}, "
            "with @Hardware.register()"
        )
    return None


_CLASS = "class of these fields"
"""Key for the class name in the mapping that a dataclass becomes. Its spaces keep it apart from fields."""


def piece_of(info: HardwareInfo) -> Piece:
    """Return *info* as a value for messages, from which `info_of` makes an equal HardwareInfo."""
    if isinstance(info, ReportedInfo):
        detail: dict[str, Any] = _plain(info.detail)
    else:
        detail = {name: value for name, value in _fields(info).items() if name not in ("type", "model")}
    return Piece(
        type=str(info.type),
        model=str(info.model),
        cls=_name(type(info)),
        detail=json.dumps(detail),
        identity=str(info.identity),
        identities=list(info.identities),
    )


def info_of(piece: Piece, path: str = "") -> HardwareInfo:
    """Return the HardwareInfo from which `piece_of` made *piece*.

    If this process has loaded the class of the HardwareInfo, the result is an instance of that class; otherwise it is a
    ReportedInfo with the same values. Raise ConfigError, with config path *path*, if the class here has other fields
    than the class on the node.
    """
    hardware_types().get(piece.type)  # imports the module of a built-in type, so that _known() finds its classes
    detail = json.loads(piece.detail)
    cls = _known(piece.cls, HardwareInfo)
    info: HardwareInfo
    if cls is None or cls is ReportedInfo:
        info = ReportedInfo(piece.type, piece.model, _restored(detail, path), piece.identity)
    else:
        try:
            info = build(cls, {"type": piece.type, "model": piece.model, **_restored(detail, path)}, path)
        except ConfigError as error:
            raise ConfigError(
                f"what the node found does not fit class {piece.cls} here: {error}; is the same version of its package "
                "installed on both?",
                path=path,
            ) from None
    info.identities = piece.identities
    return info


def _fields(value: Any) -> dict[str, Any]:
    return {spec.name: _plain(getattr(value, spec.name)) for spec in dataclasses.fields(value) if spec.init}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_CLASS: _name(type(value)), **_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    value = getattr(value, "value", value)  # the value of an enum member
    return value if type(value) in (bool, int, float, str) else str(value)


def _restored(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_restored(item, path) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _restored(item, path) for key, item in value.items() if key != _CLASS}
    cls = _known(str(value[_CLASS]), HardwareConfig) if _CLASS in value else None
    return fields if cls is None else build(cls, fields, path)


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _known(name: str, base: type[Any]) -> type[Any] | None:
    """Return *base* or the subclass of *base* whose name is *name* (``module:qualname``).

    Return None if this process has loaded no such class.
    """
    classes = [base, *_below(base)]
    return next((cls for cls in reversed(classes) if _name(cls) == name), None)


def _below(base: type[Any]) -> Iterator[type[Any]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _below(cls)
