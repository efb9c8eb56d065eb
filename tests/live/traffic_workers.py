"""A worker that sends and receives at random, and checks order, loss and contents."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np

from rlinf_actors import PeerDiedError, Worker

SIZES = (0, 10, 1000, 20_000, 300_000, 3_000_000)


class Traffic(Worker):
    def pid(self) -> int:
        return os.getpid()

    def meet(self, others: list[str]) -> None:
        for name in others:
            self.send("hello", name, 0)
        for name in others:
            assert self.recv(name, 0) == "hello"

    def talk(self, others: list[str], count: int, seed: int, half: bool = False) -> dict[str, Any]:
        """Send *count* numbered messages to each and receive as many; what became of it, by name.

        With *half* it stops in the middle and waits for its end, which would come too late for some of it otherwise.
        """
        ended: dict[str, Any] = {}
        count = count // 2 if half else count
        threads = []
        for name in others:
            threads += [
                threading.Thread(target=self._run, args=(ended, f"to {name}", self._send_all, name, count, seed)),
                threading.Thread(target=self._run, args=(ended, f"from {name}", self._receive_all, name, count, seed)),
            ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if half:
            threading.Event().wait()
        assert self._context is not None
        ended["held"] = len(self._context.messenger._mailbox)
        return ended

    def _run(self, ended: dict[str, Any], what: str, action: Any, name: str, count: int, seed: int) -> None:
        try:
            action(name, count, random.Random(f"{what} {seed}"))
            ended[what] = "all"
        except PeerDiedError:
            ended[what] = "died"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            ended[what] = repr(error)

    def _send_all(self, name: str, count: int, rng: random.Random) -> None:
        works = []
        for n in range(count):
            value = (n, np.full(rng.choice(SIZES), n % 251, np.uint8))
            if rng.random() < 0.5:
                self.send(value, name, 0)
            else:
                works.append(self.send(value, name, 0, async_op=True))
        failed = 0
        for work in works:
            try:
                work.wait()
            except PeerDiedError:
                failed += 1
        if failed:
            raise PeerDiedError(f"{failed} sends failed", peer=name)

    def _receive_all(self, name: str, count: int, rng: random.Random) -> None:
        expected = 0
        while expected < count:
            kind = rng.random()
            try:
                if kind < 0.3:
                    number, array = self.recv(name, 0, async_op=True).wait()
                else:
                    number, array = self.recv(name, 0, timeout=0.001 if kind < 0.6 else None)
            except TimeoutError:
                continue
            assert number == expected, f"{number} came where {expected} was due"
            assert (array == number % 251).all(), f"message {number} was changed on its way"
            expected += 1
