"""Worker classes of the tensor tests."""

from __future__ import annotations

from typing import Any

import torch
from message_workers import Talker


class TensorTalker(Talker):
    """Sends and receives tensors."""

    def say_tensor(self, shape: tuple[int, ...], fill: float, group: str, dtype: str = "float32") -> None:
        self.send_tensor(torch.full(shape, fill, dtype=getattr(torch, dtype)), group, 0)

    def hear_tensor(self, shape: tuple[int, ...], group: str, async_op: bool = False) -> list[float]:
        target = torch.zeros(shape)
        work = self.recv_tensor(target, group, 0, async_op=async_op)
        if work is not None:
            work.wait()
        return [target.min().item(), target.max().item()]

    def say_and_change(self, group: str, count: int) -> None:
        """What was sent is what it was when send() was called."""
        tensor = torch.zeros(300_000)
        small = torch.zeros(10)
        for n in range(count):
            tensor.fill_(n)
            small.fill_(n)
            self.send([tensor, small], group, 0)

    def hear_filled(self, group: str, count: int) -> list[bool]:
        good = []
        for n in range(count):
            tensor, small = self.recv(group, 0)
            good.append(bool((tensor == n).all()) and bool((small == n).all()))
            tensor += 1  # it is ours
        return good

    def say_not_contiguous(self, group: str) -> str:
        bad = torch.zeros(3, 4).t()
        said = []
        for call in (lambda: self.send({"a": bad}, group, 0), lambda: self.send_tensor(bad, group, 0, async_op=True)):
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        return "\n".join(said)

    def give_and_change(self, groups: Any, count: int) -> list[bool]:
        good = []
        for n in range(count):
            mine = torch.full((100_000,), float(n)) if self._rank == 0 else None
            got = self.broadcast(mine, groups=groups)
            good.append(bool((got == n).all()))
            got.fill_(-1)  # the others have their own
        return good
