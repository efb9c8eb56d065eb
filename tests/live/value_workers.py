"""Workers that pass on values of every kind, and what is to be known of a value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from rlinf_actors import Channel, Worker

GROUPS = [("a", 0), ("b", 0)]


@dataclass
class Held:
    value: Any
    other: Any = None


class Tagged(torch.Tensor):
    """A tensor of a class of the user's."""


def facts(value: Any, writable: bool | None = None) -> Any:
    """All that is to arrive of *value*, by which it can be compared. Writes to each array and dense tensor.

    *writable* is what to say of arrays; None for what is so.
    """
    if isinstance(value, np.ndarray):
        found = value.flags
        if found.writeable and value.size:
            value[(0,) * value.ndim] = value[(0,) * value.ndim]
        content = repr(value.tolist()) if value.dtype.hasobject else value.tobytes()
        about = (value.shape, found.c_contiguous, found.f_contiguous, found.writeable if writable is None else writable)
        return type(value).__name__, str(value.dtype), *about, _digest(content)
    if isinstance(value, torch.Tensor):
        about = (str(value.dtype), str(value.layout), value.is_nested, value.device.type, value.requires_grad)
        attributes = {} if value.layout is torch.jagged else vars(value)  # of its own, a number for each copy
        return type(value).__name__, *about, _content(value), facts(attributes, writable)
    if isinstance(value, memoryview):
        value = value.tobytes()  # as it arrives
    if isinstance(value, (bytes, bytearray)):
        return type(value).__name__, len(value), _digest(value)
    if is_dataclass(value):
        return type(value).__name__, [facts(getattr(value, field.name), writable) for field in fields(value)]
    if isinstance(value, dict):
        return {key: facts(one, writable) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [facts(one, writable) for one in value]
    return type(value).__name__, repr(value)


def _content(tensor: torch.Tensor) -> Any:
    with torch.no_grad():
        if tensor.is_nested:
            return [facts(one.detach()) for one in tensor.unbind()]
        if tensor.layout is torch.sparse_coo:
            inner = facts([tensor._indices(), tensor._values().detach()])
            return tensor.is_coalesced(), tuple(tensor.shape), inner
        if tensor.layout is torch.sparse_csr:
            return facts([tensor.crow_indices(), tensor.col_indices(), tensor.values().detach()])
        if tensor.device.type == "meta":
            return tuple(tensor.shape)
        if tensor.numel() and not tensor.requires_grad:
            tensor[(0,) * tensor.ndim] = tensor[(0,) * tensor.ndim].clone()
        plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
        return tuple(tensor.shape), _digest(plain.view(-1).view(torch.uint8).numpy() if plain.numel() else b"")


def _digest(content: Any) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


class Passer(Worker):
    """Passes values on, and says what came."""

    def what_came(self, value: Any) -> Any:
        return facts(value)

    def echo(self, value: Any) -> Any:
        return value

    def stream(self, values: list[Any]) -> Iterator[Any]:
        yield from values

    def put_all(self, channel: Channel[Any], values: list[Any]) -> None:
        for value in values:
            channel.put(value)

    def get_all(self, channel: Channel[Any], count: int) -> list[Any]:
        return [facts(channel.get()) for _ in range(count)]

    def send_all(self, values: list[Any], to: str, way: str) -> None:
        works = []
        for value in values:
            if way == "first":
                self._messenger("send()", None)._receivers.clear()  # as if nothing was sent before
            if way == "broadcast":
                works.append(self.broadcast(value, groups=GROUPS, async_op=True))
            elif way == "piggyback":
                works.append(self.send("first", to, 0, piggyback_payload=[value], async_op=True))
            else:
                works.append(self.send(value, to, 0, async_op=True))
        for work in works:
            work.wait()

    def receive_all(self, count: int, sender: str, way: str) -> list[Any]:
        if way == "broadcast":
            return [facts(self.broadcast(groups=GROUPS)) for _ in range(count)]
        came = [self.recv(sender, 0) for _ in range(count)]
        return [facts(value[1][0] if way == "piggyback" else value) for value in came]
