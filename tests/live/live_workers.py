"""Worker classes and small helpers of the live tests. Importable in workers: pytest puts this directory on sys.path."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker, procfs

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT_ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
"""For scripts that a test runs: the project need not be installed."""


def wait_for_end(pidfd: int, timeout: float = 10.0) -> None:
    """Wait until the process of a pidfd has ended; closes it."""
    ended, _, _ = select.select([pidfd], [], [], timeout)
    os.close(pidfd)
    assert ended, "the process did not end"


def running(pid: int) -> bool:
    """Whether a process exists and has not ended (an orphan that nobody reaps is a zombie for ever)."""
    found = procfs.stat(pid)
    return found is not None and found.state not in "ZX"


def on_every_node(cluster: Cluster, cls: type, *args: Any, name: str | None = None, **options: Any) -> Any:
    """One worker on each node."""
    strategy = NodePlacementStrategy(list(range(cluster.num_nodes)))
    return cls.create_group(*args).launch(cluster, strategy, name=name, **options)


def many(cluster: Cluster, cls: type, count: int, *args: Any, name: str | None = None, **options: Any) -> Any:
    """*count* workers on node 0."""
    return cls.create_group(*args).launch(cluster, NodePlacementStrategy([0] * count), name=name, **options)


class Where(Worker):
    """Says where it is, blocks, and leaves children behind."""

    def where(self) -> tuple[int, int]:
        return self._cluster_node_rank, os.getpid()

    def block(self) -> None:
        threading.Event().wait()

    def leave_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True).pid
