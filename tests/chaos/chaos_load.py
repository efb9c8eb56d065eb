"""A driver of a chaos run: launches groups and channels, uses them, ends them, again and again.

Usage (by `chaos_scene`): python chaos_load.py HEAD FOLDER NAME NODES; EOF on stdin ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from chaos_record import Record
from chaos_workers import STOP, Actor, Caller

from rlinf_actors import CallTimeoutError, Channel, Cluster, NodePlacementStrategy, RestartPolicy, RlinfActorsError

LIMIT_S = 60.0
"""How long an operation may take before it counts as one that hangs: the head may be away, and a lease must run out."""
CALLS, ITEMS, MESSAGES, STREAM = 40, 60, 40, 200
"""Operations of one round."""
LASTING, MOST_FAILURES = 1000, 8
"""Calls of a group with a restart policy, and the number that may fail before the driver makes another group."""
PAUSE_S = 0.2
"""Pause after a failed round, because an absent node refuses every launch at once."""
BREATH_S = 0.02
"""Pause between two calls, to keep records small."""
DRAIN_S = 1.0
"""How long a get that should find nothing waits: what a killed consumer had comes back within a moment of its end."""


class Failed(Exception):
    """An operation of a round ended with an error, which was recorded."""


class Load:
    """The work of this driver, each kind on its own thread.

    Args:
        cluster: where.
        folder: of the records.
        record: this process's.
        nodes: how many there are; the first has the head and gets no workers.
    """

    def __init__(self, cluster: Cluster, folder: str, record: Record, nodes: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._record = record
        self._nodes = list(range(1, nodes))
        self._numbers = itertools.count(1)
        self.over = threading.Event()

    def run(self) -> None:
        """Work until `over` is set and the rounds under way have ended. Blocks."""
        kinds: dict[str, Callable[[str, int], None]] = {
            "calls": self._calls,
            "queue": self._queue,
            "talk": self._talk,
            "lasting": self._lasting,
        }
        threads = [threading.Thread(target=self._repeat, args=item, name=item[0]) for item in kinds.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, kind: str, once: Callable[[str, int], None]) -> None:
        for number in itertools.count():
            if self.over.is_set():
                return
            try:
                once(f"{self._record.who}-{kind}-{number}", number)
            except Failed:
                self.over.wait(PAUSE_S)

    def _do(self, what: str, wait: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
        """Run an operation and record its begin and end; raise Failed for every error."""
        number = next(self._numbers)
        self._record.write("begin", id=number, doing=what, **more)
        try:
            result = wait(*args)
        except RlinfActorsError as error:
            outcome, text = type(error).__name__, str(error)
            for kind in type(error).__mro__:  # a WorkerError is also of the class of what the method raised
                if kind.__module__ == "rlinf_actors.errors":
                    outcome = kind.__name__
                    break
        except Exception:  # noqa: BLE001 - it is written down, and judged
            outcome, text = "bug", traceback.format_exc()
        else:
            self._record.write("end", id=number, outcome="ok")
            return result
        self._record.write("end", id=number, outcome=outcome, text=text[:2000])
        raise Failed

    @contextlib.contextmanager
    def _group(self, kind: str, label: str, first: int, **options: Any) -> Iterator[Any]:
        """A group of two for the block; its name is free afterwards."""
        where = NodePlacementStrategy(sorted(self._nodes[(first + n) % len(self._nodes)] for n in range(2)))
        cls = Caller if kind in ("calls", "lasting") else Actor
        groups: list[Any] = []

        def launch() -> Any:
            maker = cls.create_group(self._folder, label, os.getpid())
            groups.append(maker.launch(self._cluster, where, name=kind, **options))
            return groups[0].wait_ready(LIMIT_S)

        try:
            yield self._do("launch", launch, label=label)
        finally:
            for group in groups:
                self._do("shutdown", group.shutdown, 1.0, label=label)

    # --- rounds ---

    def _calls(self, label: str, number: int) -> None:
        with self._group("calls", label, number) as group:
            for n in range(CALLS):
                call = f"{label}/{n}"
                given = self._do("call", _ended, group.step, call, label=label, call=call)
                self.over.wait(BREATH_S)
                if given != [call, call]:
                    self._record.write("wrong", text=f"call {call} gave {given}")
                if n % 10 == 0:
                    stream = f"{call}/stream"
                    self._do("stream", self._stream, group, stream, label=label, call=stream)

    def _lasting(self, label: str, number: int) -> None:
        """A group with a restart policy: a call may fail, and a later one reaches the next incarnation."""
        policy = RestartPolicy.on_failure(max_restarts=5, within_s=30.0, backoff_s=0.05)
        with self._group("lasting", label, number, restart=policy) as group:
            failed = 0
            for n in range(LASTING):
                told = {"label": label, "call": f"{label}/{n}", "ranks": 1}
                try:
                    self._do("lasting call", _ended, group.execute_on(n % 2).step, told["call"], **told)
                except Failed:
                    failed += 1
                if failed == MOST_FAILURES or self.over.wait(BREATH_S):
                    return

    def _stream(self, group: Any, call: str) -> None:
        due = {0: 0, 1: 0}
        for rank, number in group.numbers(call, STREAM):
            if number != due[rank]:
                self._record.write("wrong", text=f"stream {call} gave {number} where {due[rank]} was due")
            due[rank] = number + 1
        if due != {0: STREAM, 1: STREAM}:
            self._record.write("wrong", text=f"stream {call} ended at {due}")

    def _talk(self, label: str, number: int) -> None:
        with self._group("talk", label, number) as group:
            self._do("talk", _ended, group.talk, label, MESSAGES, label=label)
            self._do("rest", _ended, group.rest, label=label)

    def _queue(self, label: str, number: int) -> None:
        node = self._nodes[number % len(self._nodes)]
        channel = self._do("create", functools.partial(Channel.create, label, maxsize=16, node_rank=node), label=label)
        try:
            with (
                self._group("producers", f"{label}-p", number) as producers,
                self._group("consumers", f"{label}-c", number + 1) as consumers,
            ):
                self._transfer(channel, label, producers, consumers)
        finally:
            self._do("close", channel.close, label=label)
            with contextlib.suppress(RlinfActorsError):  # its host ends when the channel is empty
                while True:
                    channel.get(timeout=DRAIN_S)

    def _transfer(self, channel: Any, label: str, producers: Any, consumers: Any) -> None:
        eating = {rank: consumers.execute_on(rank).consume(channel, label) for rank in (0, 1)}
        making = [producers.execute_on(rank).produce(channel, label, ITEMS) for rank in (0, 1)]
        for work in making:
            with contextlib.suppress(Failed):
                self._do("produce", work.wait, LIMIT_S, label=f"{label}-p")
        for _ in eating:
            self._do("put", functools.partial(channel.put, STOP, timeout=LIMIT_S), label=label)
        well = []
        for rank, work in eating.items():
            with contextlib.suppress(Failed):
                self._do("consume", work.wait, LIMIT_S, label=f"{label}-c")
                well.append(rank)
        self._drain(channel, label)
        for rank in well:
            with contextlib.suppress(Failed):
                self._do("rest", _ended, consumers.execute_on(rank).rest, label=f"{label}-c")
        self._record.write("drained", place=label)

    def _drain(self, channel: Any, place: str) -> None:
        """Take the remaining items; this process is a consumer too."""
        while True:
            self._item("ask", ("queue", "", place))
            work = channel.get(async_op=True, timeout=DRAIN_S)
            value = self._do("drain", _or_stop, work, label=place)
            if value is None:
                self._item("stopped", ("queue", "", place))
                return
            if value == STOP:
                self._item("stopped", ("queue", "", place))
                continue
            source, n = value
            self._item("got", ("queue", source, place), n, "again" if work.redelivered else "")

    def _item(self, what: str, stream: tuple[str, str, str], n: int = 0, note: str = "") -> None:
        self._record.write("item", what=what, stream=stream, n=n, note=note)


def _ended(method: Callable[..., Any], *args: Any) -> Any:
    """A call, begun and waited for."""
    return method(*args).wait(LIMIT_S)


def _or_stop(work: Any) -> Any:
    """The item of a get, or None after its timeout."""
    try:
        return work.wait(LIMIT_S)
    except CallTimeoutError:
        return None


def main(head: str, folder: str, name: str, nodes: int) -> None:
    """Be a driver, until EOF on stdin."""
    faulthandler.register(signal.SIGUSR1)
    record = Record(folder, f"{name}.{os.getpid()}")
    record.write("driver", pid=os.getpid())
    with Cluster(nodes, head=head) as cluster:
        load = Load(cluster, folder, record, nodes)

        def watch() -> None:
            while os.read(0, 1024):
                pass
            load.over.set()

        threading.Thread(target=watch, name="stdin", daemon=True).start()
        load.run()
    record.write("bye")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
