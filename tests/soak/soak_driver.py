"""The driver of a soak: starts workers, runs rounds, replaces killed workers, samples memory."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deliveries import Stream, open_operations
from soak_log import Log, read
from soak_plan import CHANNELS, KEYS, plan
from soak_workers import LIMIT_S, STOP, Soaker, take

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, WorkerDiedError, procfs

STEADY, MORTAL = 2, 2
ROUND_S = 3 * LIMIT_S
"""Seconds after which a round counts as hanging."""
DRAIN_S = 2.0
"""Seconds without an item after which a queue counts as empty: redelivery after a consumer's death takes a moment."""


class Samples:
    """Memory (KiB) and descriptors of long-lived processes, one sample for each round."""

    def __init__(self) -> None:
        self.own: defaultdict[str, list[int]] = defaultdict(list)
        self.shared: defaultdict[str, list[int]] = defaultdict(list)
        self.descriptors: defaultdict[str, list[int]] = defaultdict(list)

    def take(self, processes: dict[str, int]) -> None:
        for name, pid in processes.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue  # the process has ended; surviving processes have a sample of every round
            self.own[name].append(int(status.partition("RssAnon:")[2].split()[0]))
            self.shared[name].append(int(status.partition("RssShmem:")[2].split()[0]))
            self.descriptors[name].append(descriptors)


class Soak:
    def __init__(self, cluster: Cluster, folder: str, seed: int, daemons: dict[str, int]) -> None:
        self._cluster = cluster
        self._folder = folder
        self._seed = seed
        self._daemons = daemons
        self._log = Log(folder, "driver")
        self._channels = {name: Channel.create(name, **options) for name, options in CHANNELS.items()}
        self._started = 0
        self._groups: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._victims: set[int] = set()
        self.killed: list[str] = []
        self.samples = Samples()
        self.rounds = 0
        for _ in range(STEADY + MORTAL):
            self._start()

    def _start(self) -> None:
        """Start one more worker, on the nodes in turn."""
        name = f"soaker{self._started}"
        where = NodePlacementStrategy([self._started % self._cluster.num_nodes])
        self._groups[name] = Soaker.create_group(self._folder, self._channels).launch(self._cluster, where, name=name)
        self._started += 1

    def round(self) -> None:
        """Run one round: all workers act, some die, gets are stopped, dead workers are replaced."""
        for name, group in self._groups.items():
            if name not in self._pids:
                self._pids[name] = group.pid().wait(LIMIT_S)[0]
        work = plan(self._seed, self.rounds, list(self._groups), STEADY)
        acting = {name: group.act(work) for name, group in self._groups.items()}
        for name, acted in acting.items():
            self._wait(name, acted, dies=name in work.victims)
        for name in work.victims:
            self.killed.append(name)
            self._victims.add(self._pids.pop(name))
            del self._groups[name]
        stops = [
            self._channels[channel].put(STOP, key=key, async_op=True)
            for who, channel, key in work.gets
            if who not in work.victims
        ]
        for name, finished in [(name, group.finish()) for name, group in self._groups.items()]:
            self._wait(name, finished, dies=False)
        for stop in stops:
            stop.wait(LIMIT_S)
        self._sample()
        for _ in work.victims:
            self._start()
        self.rounds += 1

    def _wait(self, name: str, result: Any, dies: bool) -> None:
        try:
            result.wait(ROUND_S)
        except WorkerDiedError:
            if not dies:
                raise
            return
        except TimeoutError:
            raise AssertionError(f"{name} hangs in round {self.rounds}:\n{self._stacks()}") from None
        assert not dies, f"{name} was to be killed in round {self.rounds} and lives"

    def _sample(self) -> None:
        """Sample the processes that survive the soak: steady workers, daemons, templates and channel hosts."""
        names = list(self._groups)[:STEADY]
        for tidied in [self._groups[name].tidy() for name in names]:
            tidied.wait(LIMIT_S)
        workers = set(self._pids.values()) | self._victims
        below = {pid for daemon in self._daemons.values() for pid in procfs.subtree(daemon)} - workers
        others = {f"process {pid} below an agentd": pid for pid in below - set(self._daemons.values())}
        self.samples.take({**{name: self._pids[name] for name in names}, **self._daemons, **others})

    def drain(self) -> None:
        """Take the unacknowledged items of killed workers, from all queues at once."""

        def empty(place: tuple[str, str]) -> None:
            channel, key = place
            stream = Stream("queue", "", f"{channel}/{key}")
            while take(self._log, self._channels[channel], key, stream, DRAIN_S):
                pass

        places = [(channel, key) for channel in CHANNELS for key in KEYS]
        with ThreadPoolExecutor(len(places)) as pool:
            list(pool.map(empty, places))

    def close(self) -> None:
        self._log.close()

    def _stacks(self) -> str:
        """Print the open operations and the stacks of all workers."""
        logs, said = read(self._folder), []
        for name, pid in self._pids.items():
            if name not in self._groups:
                continue
            os.kill(pid, signal.SIGUSR1)
            said += [f"{name}: {line}" for line in open_operations(logs.get(name, ()))]
        for name in self._pids:
            said.append(f"--- stacks of {name} ---\n{Path(self._folder, name + '.stacks').read_text()}")
        return "\n".join(said)
