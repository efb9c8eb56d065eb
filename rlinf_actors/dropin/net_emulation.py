"""NetEmulationManager: the names of RLinf's manager over the model of `net.emulated_path`.

Nothing of this project uses it: each sender delays its own messages (`net.network_emulation`). It serves code that asks
the manager for the time that a message would take.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlinf_actors.config.net_emulation_config import NetEmulationConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.emulated_path import Topology, Transfer, endpoints
from rlinf_actors.wire.payload import pickled_size

TENSOR_BYTES = 256
"""Bytes counted for the shape and type of a tensor inside a container."""


class NetEmulationManager:
    """Says how long messages between workers take on the network of a ``cluster.net_emulation`` section.

    Args:
        cfg: the section, a mapping or DictConfig.
        clock: the time in seconds.

    Raises:
        ConfigError: the section is not enabled, or not valid.
    """

    MANAGER_NAME = "NetEmulationManager"

    def __init__(self, cfg: Any, clock: Callable[[], float] = time.monotonic) -> None:
        config = NetEmulationConfig.from_cfg(cfg)
        if config is None:
            raise ConfigError("is not enabled, so there is no network to emulate", path="net_emulation")
        self._topology = Topology(config)
        self._clock = clock
        self._lock = threading.Lock()

    def reserve(self, src: str, dst: str, size_bytes: int) -> float:
        """Send a message of *size_bytes* from *src* to *dst*. Return the seconds until it arrives, 0.0 if the network
        between them is not emulated.
        """
        return self.reserve_broadcast(src, [dst], size_bytes)

    def reserve_broadcast(self, src: str, dsts: Sequence[str], size_bytes: int) -> float:
        """Send one message from *src* to all of *dsts*. Return the seconds until the last of them has it."""
        found = [self._topology.path(endpoints(src), endpoints(dst)) for dst in dsts]
        with self._lock:
            now, transfer = self._clock(), Transfer()
            arrivals = [path.depart(now, max(0, int(size_bytes)), transfer) for path in found if path is not None]
        return max([0.0, *(arrival - now for arrival in arrivals)])

    @classmethod
    def estimate_payload_size_bytes(cls, payload: Any) -> int:
        """Return about how many bytes *payload* takes on a network: the memory of its tensors, and all else pickled."""
        if payload is None:
            return 0
        if _is_tensor(payload):
            return _tensor_bytes(payload)
        leaves = list(_leaves(payload))
        tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
        if not tensors:
            return _pickled(payload)
        rest = sum(_pickled(leaf) for leaf in leaves if leaf is not None and not _is_tensor(leaf))
        return rest + sum(_tensor_bytes(tensor) + TENSOR_BYTES for tensor in tensors)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested containers, and the names of their keys and fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        yield list(value)
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_tensor(value: Any) -> bool:
    return callable(getattr(value, "numel", None)) and callable(getattr(value, "element_size", None))


def _tensor_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _pickled(value: Any) -> int:
    try:
        return pickled_size(value)
    except Exception:  # noqa: BLE001 - user code runs: of what cannot be pickled only the size is asked
        return max(1, len(repr(value)))
