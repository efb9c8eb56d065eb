"""Pieces of configured hardware on their way from the node that found them to the driver, as plain values. Pure.

Dataclasses inside an info (its config, mostly) travel with their names and are made again of the same class; numbers,
text, lists and mappings travel as they are; everything else as its text. No name that came over the wire is imported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlinf_actors.config.typed import build
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.registry import is_built_in, lookup
from rlinf_actors.hardware.report import ReportedInfo
from rlinf_actors.model.hardware import HardwareConfig, HardwareInfo
from rlinf_actors.wire.values import Piece

_CLASS = "class of these fields"
"""Key of a dataclass's name; no field can be called so."""


def piece_of(info: HardwareInfo) -> Piece:
    """*info* as plain values."""
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
        claim_keys=[str(key) for key in info.claim_keys],
    )


def info_of(piece: Piece, path: str = "") -> HardwareInfo:
    """The info: of its own class where this process knows that, else a ReportedInfo.

    Raises:
        ConfigError: the class here has other fields than the one on the node.
    """
    if is_built_in(piece.type):
        lookup(piece.type)  # our own module of that type, which nobody may have needed here before
    detail = json.loads(piece.detail)
    cls = _known(piece.cls, HardwareInfo)
    if cls is HardwareInfo:
        return HardwareInfo(piece.type, piece.model)
    if cls is None or cls is ReportedInfo:
        return ReportedInfo(piece.type, piece.model, _restored(detail, path), piece.identity, tuple(piece.claim_keys))
    try:
        info: HardwareInfo = build(cls, {"type": piece.type, "model": piece.model, **_restored(detail, path)}, path)
    except ConfigError as error:
        raise ConfigError(
            f"what the node found does not fit class {piece.cls} here: {error}; is the same version of its package "
            "installed on both?",
            path=path,
        ) from None
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
    value = getattr(value, "value", value)  # of an enum
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
    """The class of that name among *base* and what derives from it; the latest, of a module that was loaded twice."""
    classes = [base, *_below(base)]
    return next((cls for cls in reversed(classes) if _name(cls) == name), None)


def _below(base: type[Any]) -> Iterator[type[Any]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _below(cls)
