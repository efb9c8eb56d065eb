"""A machine with too few resources: work succeeds or the error names the limit and the fix; nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import live_workers as lw
import pace
import pytest
from namespaces import can_unshare

from rlinf_actors.cgroups.roots import find

pytestmark = pytest.mark.live

BEGIN = """
import os, resource, socket, sys
from rlinf_actors import Cluster, NodePlacementStrategy, RlinfActorsError, Worker

class Small(Worker):
    def echo(self, x):
        return x

    def port(self):
        return self.acquire_free_port()

def launch(cluster, count, name):
    return Small.create_group().launch(cluster, NodePlacementStrategy([0] * count), name=name)
"""

FEW_FILES = """
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with Cluster(num_nodes=1) as cluster:
        few = launch(cluster, 8, "few")
        print("few", few.echo(1).wait())
        try:
            launch(cluster, 60, "many").wait_ready()
        except RlinfActorsError as error:
            print("many", type(error).__name__, error)
        print("few", few.echo(2).wait())
"""

SMALL_SHM = """
if __name__ == "__main__":
    with Cluster(num_nodes=1) as cluster:
        group = launch(cluster, 2, "group")
        print([len(x) for x in group.echo(bytearray(8 << 20)).wait()], os.statvfs("/dev/shm").f_blocks)
"""

NO_PORTS = """
if __name__ == "__main__":
    with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
        file.write("60000 60009")
    held = []
    with Cluster(num_nodes=1) as cluster:
        early = launch(cluster, 1, "early")
        early.wait_ready()
        try:
            while True:
                held.append(socket.create_server(("", 0)))
        except OSError:
            pass
        for name, ask in (
            ("late", lambda: launch(cluster, 1, "late").wait_ready()),
            ("port", lambda: early.port().wait()),
        ):
            try:
                ask()
            except Exception as error:
                print(name, type(error).__name__, " ".join(str(error).split()))
        for one in held:
            one.close()
        print("early", len(early.port().wait()), launch(cluster, 1, "later").echo(3).wait())
"""


def run(tmp_path, source, prefix=(), arguments=()):
    path = lw.script(tmp_path, BEGIN + source)
    return subprocess.run(
        [*prefix, sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": lw.SCRIPT_ENV["PYTHONPATH"]},
        timeout=pace.PATIENCE_S,
    )


def apart(*options, prepare):
    """A command line that runs a program in namespaces of its own, after *prepare*."""
    within = [*options, "sh", "-c", f'{prepare} && exec "$@"', "sh"]
    if not can_unshare(*within, "true"):
        pytest.skip("needs root and namespaces")
    return ["unshare", *within]


def test_256_open_files_suffice_or_are_named(tmp_path, rlinf_leak_check):
    done = run(tmp_path, FEW_FILES)
    first, refused, last = done.stdout.splitlines()
    assert (first, last) == (f"few {[1] * 8}", f"few {[2] * 8}"), "those that run are not touched"
    assert "Too many open files: this process may have 256, and at most 256" in refused
    assert "ulimit -n 65536" in refused
    assert done.returncode == 0, done.stderr


def test_dev_shm_of_1_mib_suffices_or_is_named(tmp_path, rlinf_leak_check):
    done = run(tmp_path, SMALL_SHM, apart("--mount", prepare="mount -t tmpfs -o size=1m tmpfs /dev/shm"))
    assert done.stdout == f"{[8 << 20] * 2} 256\n", done.stderr


def test_exhausted_ports_are_named(tmp_path, rlinf_leak_check):
    done = run(tmp_path, NO_PORTS, apart("--net", prepare="ip link set lo up"))
    late, port, early = done.stdout.splitlines()
    for line, kind in ((late, "late WorkerStartError"), (port, "port ")):
        assert line.startswith(kind)
        assert "no TCP port is free: the kernel gives out 60000-60009" in line
    assert early == "early 1 [3]", done.stderr


FEW_PROCESSES = """
if __name__ == "__main__":
    with open(sys.argv[1] + "/cgroup.procs", "w") as file:
        file.write("0")
    try:
        with Cluster(num_nodes=1) as cluster:
            print(launch(cluster, 1, "one").echo(1).wait())
    except (RlinfActorsError, RuntimeError, BlockingIOError) as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def pids_cgroup():
    """A cgroup for a driver, in which nothing else runs."""
    roots = find()
    if why := roots.missing(None, 1):
        pytest.skip(why)
    directory = Path(roots.v1.get("pids", roots.unified)) / f"rlt-{os.getpid()}"
    directory.mkdir()
    yield directory
    for inner, _, _ in os.walk(directory, topdown=False):
        os.rmdir(inner)


@pytest.mark.parametrize("limit", [1, 4], ids=["for the driver", "for its agentd"])
def test_exhausted_pids_limit_of_the_driver_is_named(tmp_path, pids_cgroup, rlinf_leak_check, limit):
    (pids_cgroup / "pids.max").write_text(str(limit))
    done = run(tmp_path, FEW_PROCESSES, arguments=[str(pids_cgroup)])
    assert f"cgroup {pids_cgroup} may have {limit} processes and threads together" in done.stdout, done.stderr
    assert ("the private agentd cannot be started" in done.stdout) == (limit == 4)
    assert done.returncode == 0, done.stderr
