"""Node ranks as people write them: ``3``, ``"0-7,12"``, ``all``, or a list of those."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlinf_actors.config.fields import refuse_sexagesimal
from rlinf_actors.errors import ConfigError

_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_FORMS = 'a rank (3), ranges ("0-7,12"), "all", or a list of ranks'


def parse_node_ranks(value: Any, num_nodes: int, path: str) -> tuple[int, ...]:
    """The ranks that *value* names, ascending; ``all`` is 0 to *num_nodes* - 1.

    Raises:
        ConfigError: the form is none of those above, a rank repeats or is not below *num_nodes*.
    """
    ranks = _collect(value, num_nodes, path)
    if not ranks:
        raise ConfigError(f"is {value!r}, which names no node; it must be {_FORMS}", path=path)
    seen: set[int] = set()
    for rank in ranks:
        if rank >= num_nodes:
            nodes = "one node: rank 0" if num_nodes == 1 else f"{num_nodes} nodes: ranks 0-{num_nodes - 1}"
            raise ConfigError(f"names node {rank}, but the cluster has {nodes} (num_nodes: {num_nodes})", path=path)
        if rank in seen:
            raise ConfigError(f"names node {rank} twice in {value!r}", path=path)
        seen.add(rank)
    return tuple(sorted(ranks))


def _collect(value: Any, num_nodes: int, path: str) -> Sequence[int]:
    refuse_sexagesimal(value, path)
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"is {value!r}; it must be {_FORMS}", path=path)
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"is {value}; ranks count from 0", path=path)
        return [value]
    if isinstance(value, str):
        if value.strip().lower() == "all":
            return range(num_nodes)
        return [rank for piece in value.split(",") for rank in _range(piece, num_nodes, value, path)]
    if isinstance(value, (list, tuple)):
        return [rank for index, item in enumerate(value) for rank in _item(item, num_nodes, f"{path}[{index}]")]
    raise ConfigError(f"is {value!r}; it must be {_FORMS}", path=path)


def _item(value: Any, num_nodes: int, path: str) -> Sequence[int]:
    if isinstance(value, (list, tuple)) or (isinstance(value, str) and value.strip().lower() == "all"):
        raise ConfigError(f"is {value!r}; inside a list it must be a rank or ranges", path=path)
    return _collect(value, num_nodes, path)


def _range(piece: str, num_nodes: int, whole: str, path: str) -> range:
    match = _RANGE.fullmatch(piece)
    if match is None:
        raise ConfigError(f"cannot read {piece.strip()!r} in {whole!r}; it must be {_FORMS}", path=path)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"{first}-{last} in {whole!r} runs backwards; write {last}-{first}", path=path)
    # Stop one past the end: enough for the caller to refuse it, however long the range is.
    return range(first, min(last, max(first, num_nodes)) + 1)
