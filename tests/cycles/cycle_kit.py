"""The resources of processes, before and after many starts and stops."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nightly import Figures

from rlinf_actors import Worker, procfs
from rlinf_actors.cgroups.roots import PARENT, find

ASKED = 20
"""Groups that may start and end between two beats."""
PRIVATE_MIB = 5
"""Permitted growth of a process's private resident memory after any number of cycles.

Shared memory is not in it: an arena keeps the pages of the most blocks that were ever lent at a time, up to 64 MiB, and
that number follows the load of the machine. Whether blocks stay lent, tests ask the arena.
"""
HEAD_MIB = 8
"""The same for an agentd with the head, after 1,000 cycles: its event log and its tombstones of ended clients and
groups fill up besides. Both are bounded: 10,000 events, 4,096 clients.
"""


class Small(Worker):
    """A worker with small and large results, and a child process that it leaves behind."""

    def work(self, leave: bool) -> tuple[int, int]:
        return self.leave() if leave else (os.getpid(), 0)

    def leave(self) -> tuple[int, int]:
        """Return the pids of this process and of a child in its own session."""
        code = "import os; os.setsid(); print(flush=True); os.execvp('sleep', ['sleep', '1000'])"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        return os.getpid(), child.pid

    def block(self) -> None:
        """Wait for the end of this process."""
        threading.Event().wait()

    def big(self) -> bytes:
        return bytes(300_000)


@dataclass(frozen=True)
class Held:
    """The resources of one process. Comparison ignores the memory, which `check` compares."""

    name: str
    fds: tuple[str, ...]
    threads: int
    children: tuple[str, ...]
    private_kib: int = field(compare=False)


def held(name: str, pid: int) -> Held:
    """The resources that a process holds now."""
    gc.collect()
    fds = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            fds.append(_kind(os.readlink(f"/proc/{pid}/fd/{fd}")))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    found = [(child, stat) for child in procfs.children(pid) if (stat := procfs.stat(child))]
    children = ["a zombie" if stat.ended else _command(child) for child, stat in found]
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    private = (resident - shared) * os.sysconf("SC_PAGE_SIZE") // 1024
    return Held(name, tuple(sorted(fds)), len(os.listdir(f"/proc/{pid}/task")), tuple(sorted(children)), private)


def alive(pid: int) -> bool:
    """True if the process runs."""
    found = procfs.stat(pid)
    return found is not None and not found.ended


def template_of(agent: int) -> int:
    """The pid of an agentd's only template."""
    (template,) = [pid for pid in procfs.subtree(agent) if _command(pid) == "rlinf-template"]
    return template


def files(run_dir: str, template: int) -> list[str]:
    """The files of a run directory without logs, and the cgroups of a template's workers.

    agentd keeps an order on disk until the head has answered a later beat, so few groups have files at a time.
    """
    asked = list(Path(run_dir, "l").glob("*"))
    assert len(asked) <= ASKED, asked
    found = [str(path) for path in Path(run_dir).rglob("*") if "logs" not in path.parts and path not in asked]
    for root in find().directories():
        found += [str(path) for path in Path(root, PARENT).glob(f"*.{template}.*")]
    return sorted(found)


def check(before: Iterable[Held], after: Iterable[Held], cycles: int, unit: str, figures: Figures) -> None:
    """Check that no process holds more than before."""
    problems = []
    for old, new in zip(before, after, strict=True):
        grown = (new.private_kib - old.private_kib) / 1024
        figures.add(
            f"{new.name} after {cycles} {unit}",
            f"{len(new.fds)} descriptors, {new.threads} threads, private memory "
            f"{old.private_kib / 1024:.1f} to {new.private_kib / 1024:.1f} MiB",
        )
        if new.threads != old.threads:
            problems.append(f"{new.name}: {old.threads} threads became {new.threads}")
        for what, was, now in (("fds", old.fds, new.fds), ("children", old.children, new.children)):
            if was != now:
                problems.append(
                    f"{new.name}: {what}: new {Counter(now) - Counter(was)}, gone {Counter(was) - Counter(now)}"
                )
        if grown > (HEAD_MIB if "head" in new.name else PRIVATE_MIB):
            problems.append(f"{new.name} has grown by {grown:.1f} MiB")
    assert not problems, "; ".join(problems)


def _kind(link: str) -> str:
    return link.split(":[")[0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
