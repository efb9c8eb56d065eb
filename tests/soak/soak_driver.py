"""The driver of a soak: starts workers, gives out rounds, replaces the killed, samples memory."""

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
"""How long a round may take before the driver says that it hangs."""
DRAIN_S = 2.0
"""How long nothing may come of a queue for it to be empty: what a killed consumer had comes back after its death."""


class Samples:
    """KiB of memory and numbers of descriptors of long-lived processes, a sample a round."""

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
                continue  # it has ended; those that live through the soak have a sample of every round
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
        """One more worker, on each node in turn."""
        name = f"soaker{self._started}"
        where = NodePlacementStrategy([self._started % self._cluster.num_nodes])
        self._groups[name] = Soaker.create_group(self._folder, self._channels).launch(self._cluster, where, name=name)
        self._started += 1

    def round(self) -> None:
        """One round: all act, some die, the gets are stopped, the dead are replaced."""
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
        """Who lives through the soak: the steady workers, the daemons, their templates and the channels' hosts."""
        names = list(self._groups)[:STEADY]
        for tidied in [self._groups[name].tidy() for name in names]:
            tidied.wait(LIMIT_S)
        workers = set(self._pids.values()) | self._victims
        below = {pid for daemon in self._daemons.values() for pid in procfs.subtree(daemon)} - workers
        others = {f"process {pid} below an agentd": pid for pid in below - set(self._daemons.values())}
        self.samples.take({**{name: self._pids[name] for name in names}, **self._daemons, **others})

    def drain(self) -> None:
        """Take what the killed had not acknowledged, from all queues at a time."""

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
        """What everybody is in the middle of, and where."""
        logs, said = read(self._folder), []
        for name, pid in self._pids.items():
            if name not in self._groups:
                continue
            os.kill(pid, signal.SIGUSR1)
            said += [f"{name}: {line}" for line in open_operations(logs.get(name, ()))]
        for name in self._pids:
            said.append(f"--- stacks of {name} ---\n{Path(self._folder, name + '.stacks').read_text()}")
        return "\n".join(said)
