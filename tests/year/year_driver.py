"""A job of the year: two workers, one on each node. It does what each line on stdin says, and answers with a line
that begins with "year: ".

    python year_driver.py JOB        answers "up [PID, PID]", then "ok ..." or "failed TYPE: TEXT"

`work` calls, sends and puts; `exit RANK` ends a worker with a code; `hang RANK` leaves a worker in a method for good;
`say RANK KIB` has a worker print; `raise` ends this script with an exception; `end` ends it well.

    python year_driver.py JOB COUNT  runs the jobs JOB-0 to JOB-(COUNT - 1), one after the other, and answers "done"

These do as little as a job can, and most have no workers: they fill what the daemons keep of ended jobs.
"""

from __future__ import annotations

import os
import sys
import time

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker, WorkerGroup

WITH_WORKERS = 16
"""Of so many small jobs, one has workers."""


class Hand(Worker):
    def look(self) -> int:
        print(f"hand {self._rank} of {os.environ['YEAR_JOB']} is at work", flush=True)
        return os.getpid()

    def add(self, data: bytes) -> int:
        return len(data)

    def pass_on(self, data: bytes) -> int:
        """Send *data* from rank 0 to rank 1."""
        if self._rank == 0:
            self.send(data, "hands", 1)
            return len(data)
        return len(self.recv("hands", 0))

    def leave(self, code: int) -> None:
        print(f"planned exit of {os.environ['YEAR_JOB']}", file=sys.stderr, flush=True)
        os._exit(code)

    def hang(self) -> None:
        time.sleep(3600)

    def say(self, kib: int) -> None:
        for number in range(kib):
            print(f"{number:08d} ".ljust(1023, "x"), flush=True)


def launched(cluster: Cluster, job: str) -> WorkerGroup:
    return Hand.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="hands", env_vars={"YEAR_JOB": job})


class Job:
    def __init__(self, name: str) -> None:
        os.environ["YEAR_JOB"] = name
        self.group = launched(Cluster(num_nodes=2, namespace=name), name)
        self.made = 0

    def work(self) -> str:
        data = os.urandom(200_000)
        assert self.group.add(data).wait(30) == [len(data)] * 2
        assert self.group.pass_on(data).wait(30) == [len(data)] * 2
        channel = Channel.create(f"items-{self.made}")
        self.made += 1
        channel.put(data)
        assert channel.get() == data
        channel.close()
        return "worked"

    def obey(self, verb: str, *words: str) -> str:
        if verb == "work":
            return self.work()
        rank = self.group.execute_on(int(words[0]))
        if verb == "exit":
            rank.leave(3).wait(30)
        elif verb == "say":
            rank.say(int(words[1])).wait(60)
        elif verb == "hang":
            rank.hang()
            return "hangs"
        return "done"


def many(name: str, count: int) -> None:
    """Run so many small jobs."""
    for number in range(count):
        job = f"{name}-{number}"
        with Cluster(num_nodes=2, namespace=job) as cluster:
            if number % WITH_WORKERS == 0:
                launched(cluster, job).look().wait(60)


def main() -> None:
    if len(sys.argv) == 3:
        many(sys.argv[1], int(sys.argv[2]))
        print("year: done", flush=True)
        return
    job = Job(sys.argv[1])
    print("year: up", job.group.look().wait(60), flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "raise":
            raise RuntimeError(f"planned failure of {sys.argv[1]}")
        if verb == "end":
            break
        try:
            said = f"ok {job.obey(verb, *words)}"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            said = f"failed {type(error).__name__}: {' '.join(str(error).split())}"
        print("year:", said, flush=True)


if __name__ == "__main__":
    main()
