"""Worker classes of the tensor tests."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from message_workers import Talker

from rlinf_actors.messaging import pieces
from rlinf_actors.worker.context import current


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


class LargeTalker(Talker):
    """Sends and receives tensors that are written in pieces."""

    def say_large(self, size: int, count: int, group: str) -> None:
        for n in range(count):
            self.send_tensor(torch.arange(n, n + size).to(torch.uint8), group, 0)

    def hear_large(self, size: int, kinds: list[str], group: str) -> list[bool]:
        """Receive one tensor in each of the ways *kinds*. Return for each if it is what was sent."""
        good = []
        for n, kind in enumerate(kinds):
            got: Any = torch.zeros(size, dtype=torch.uint8)
            if kind == "into":
                self.recv_tensor(got, group, 0)
            elif kind == "into later":
                self.recv_tensor(got, group, 0, async_op=True).wait()
            else:
                got = self.recv(group, 0)
            good.append(torch.equal(got, torch.arange(n, n + size).to(torch.uint8)))
        return good

    def stop_after_a_piece(self, size: int, group: str) -> None:
        """Send a tensor, but stop when one piece of it is written."""
        copy = pieces.copy

        def copy_once(*args: Any) -> None:
            pieces.copy = lambda *_args: threading.Event().wait()
            copy(*args)

        pieces.copy = copy_once
        self.send_tensor(torch.ones(size, dtype=torch.uint8), group, 0)

    def wait_until_begun(self) -> None:
        context = current()
        assert context is not None
        while not context.messenger.arriving:
            time.sleep(0.01)
