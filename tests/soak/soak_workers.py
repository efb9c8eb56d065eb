"""A worker of the soak: does its part of a round in many threads, and logs all events."""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from deliveries import Stream
from soak_log import Log
from soak_plan import BASE, Item, Round, items

from rlinf_actors import GroupNotFoundError, PeerDiedError, Worker

LIMIT_S = 60.0
"""Time limit of an operation in seconds."""
STOP = "stop"
MESSAGES, CASTS, PUTS = 25, 6, 30
"""The most messages of a pair, broadcasts of a round and items of a producer."""


@functools.cache
def block() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, BASE, np.uint8)


def content(item: Item) -> np.ndarray:
    return block()[item.offset : item.offset + item.size]


def damage(value: Any, item: Item) -> str:
    got = value.numpy() if isinstance(value, torch.Tensor) else value
    return "" if got.shape == (item.size,) and np.array_equal(got, content(item)) else "damaged"


class Soaker(Worker):
    """A group of one."""

    def __init__(self, folder: str, channels: dict[str, Any]) -> None:
        super().__init__()
        block()
        self._log = Log(folder, self._group_name)
        self._channels = channels
        self._next: dict[Stream, int] = {}
        self._errors: list[BaseException] = []
        self._consumers: list[threading.Thread] = []
        self._stacks = open(f"{folder}/{self._group_name}.stacks", "w")  # noqa: SIM115 - for the life of the process
        faulthandler.register(signal.SIGUSR1, self._stacks)

    def pid(self) -> int:
        return os.getpid()

    def tidy(self) -> None:
        """Collect garbage, and return malloc's free pages to the system."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def act(self, work: Round) -> None:
        """Do all of a round; the gets go on until `finish`."""
        me = self._group_name
        if me in work.victims:
            self._log.die_after(work.victims[me])
        self._consumers = [self._thread(self._get_all, channel, key) for who, channel, key in work.gets if who == me]
        threads = [self._thread(self._cast_all, work)]
        for other in work.names:
            if other != me:
                threads += [self._thread(self._send_all, work, other), self._thread(self._receive_all, work, other)]
        threads += [self._thread(self._put_all, work, channel, key) for who, channel, key in work.puts if who == me]
        for thread in threads:
            thread.join()
        if me in work.victims:
            os.kill(os.getpid(), signal.SIGKILL)
        self._raise()

    def finish(self) -> None:
        """Wait for the gets, each of which ends with the STOP that the driver puts."""
        for thread in self._consumers:
            thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    def _thread(self, action: Callable[..., None], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                action(*args)
            except BaseException as error:  # noqa: BLE001 - act() and finish() raise it
                self._errors.append(error)

        thread = threading.Thread(target=run, name=f"{action.__name__}{args[1:]}", daemon=True)
        thread.start()
        return thread

    def _ended(self, wait: Callable[[], Any], stream: Stream, n: int, what: str) -> Any:
        """Return the operation's result; if it fails, log that and return None."""
        try:
            return (wait(),)
        except (PeerDiedError, GroupNotFoundError) as error:  # the second if the peer had ended before its first use
            self._log.write("refused", stream, n, f"{what} ({error})")
        except TimeoutError:
            self._log.write("late", stream, n, what)
        return None

    # --- send and receive ---

    def _send_all(self, work: Round, to: str) -> None:
        stream = Stream("pair", self._group_name, to)
        pending: list[tuple[int, Any]] = []
        for n, item in self._numbered(work, stream, MESSAGES, tensors=True):
            self._log.write("offer", stream, n)
            value = torch.from_numpy(content(item).copy()) if item.tensor else (n, content(item))
            send = functools.partial(self.send_tensor if item.tensor else self.send, value, to, 0)
            if item.at_once:
                pending.append((n, send(async_op=True)))
            elif self._ended(send, stream, n, "send"):
                self._log.write("sent", stream, n)
            else:
                break
        for n, given in pending:
            if self._ended(functools.partial(given.wait, LIMIT_S), stream, n, "send"):
                self._log.write("sent", stream, n)

    def _receive_all(self, work: Round, sender: str) -> None:
        stream = Stream("pair", sender, self._group_name)
        for due, item in self._numbered(work, stream, MESSAGES, tensors=True):
            self._log.write("ask", stream, due)
            into = torch.empty(item.size, dtype=torch.uint8)
            receive = functools.partial(self.recv_tensor, into, sender, 0) if item.tensor else None
            receive = receive or functools.partial(self.recv, sender, 0)
            if item.at_once:
                got = self._ended(functools.partial(receive(async_op=True).wait, LIMIT_S), stream, due, "get")
            else:
                got = self._ended(functools.partial(receive, timeout=LIMIT_S), stream, due, "get")
            if not got:
                return
            # a tensor has no number; out of order, its content or shape is wrong
            n, value = (due, into) if item.tensor else got[0]
            self._log.write("got", stream, n, damage(value, item))

    def _numbered(self, work: Round, stream: Stream, most: int, tensors: bool = False) -> Iterator[tuple[int, Item]]:
        """This round's items of a stream. Numbers continue from round to round."""
        made = items(f"{work.seed} {stream}", most, tensors)
        first = self._next.get(stream, 0)
        self._next[stream] = first + len(made)
        return enumerate(made, first)

    # --- broadcast ---

    def _cast_all(self, work: Round) -> None:
        me = self._group_name
        stream = Stream("cast", work.caster, f"{work.seed}:{','.join(work.names)}")
        members = [(name, 0) for name in work.names]
        for n, item in enumerate(items(f"{work.seed} {stream}", CASTS)):
            mine = me == work.caster
            self._log.write("offer" if mine else "ask", stream, n)
            value = (n, content(item)) if mine else None
            given = self.broadcast(value, groups=members, src=(work.caster, 0), async_op=True)
            got = self._ended(functools.partial(given.wait, LIMIT_S), stream, n, "send" if mine else "get")
            if not got:
                return
            if mine:
                self._log.write("sent", stream, n)
            else:
                number, array = got[0]
                self._log.write("got", stream, number, damage(array, item))

    # --- channels ---

    def _put_all(self, work: Round, channel: str, key: str) -> None:
        stream = Stream("queue", self._group_name, f"{channel}/{key}")
        pending: collections.deque[tuple[int, Any]] = collections.deque()
        for n, item in self._numbered(work, stream, PUTS):
            self._log.write("offer", stream, n)
            value = (self._group_name, n, item, content(item))
            pending.append((n, self._channels[channel].put(value, key=key, async_op=True)))
            while pending and (not item.at_once or len(pending) > 8):
                self._put(stream, *pending.popleft())
        while pending:
            self._put(stream, *pending.popleft())

    def _put(self, stream: Stream, n: int, work: Any) -> None:
        if self._ended(functools.partial(work.wait, LIMIT_S), stream, n, "put"):
            self._log.write("sent", stream, n)

    def _get_all(self, channel: str, key: str) -> None:
        place = Stream("queue", "", f"{channel}/{key}")
        while take(self._log, self._channels[channel], key, place):
            pass


def take(log: Log, channel: Any, key: str, place: Stream, empty_s: float | None = None) -> bool:
    """Do one get and log it; return False after STOP, or if no item came within *empty_s*."""
    log.write("ask", place)
    work = channel.get(key, async_op=True, timeout=empty_s)
    try:
        value = work.wait(LIMIT_S)  # only the host's answer counts: an item under way is not yet the end of the queue
    except TimeoutError:
        log.write("late" if empty_s is None else "stopped", place, 0, "get")
        return False
    if value == STOP:
        log.write("stopped", place)
        return False
    source, n, item, array = value
    note = " ".join(filter(None, (damage(array, item), "again" if work.redelivered else "")))
    log.write("got", place._replace(source=source), n, note)
    return True
