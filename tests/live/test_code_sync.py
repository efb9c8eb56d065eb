"""A driver sends its code to its node: workers run the copy, changes arrive with the next launch, faults are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

CODE = """
    import os
    import sys
    from rlinf_actors import Cluster, NodePlacementStrategy, Worker
    from lib import helper

    class Teller(Worker):
        def tell(self):
            return {
                "value": helper.VALUE,
                "file": helper.__file__,
                "cwd": os.getcwd(),
                "data": open("data.txt").read(),
                "hash": self.worker_info.code_hash,
                "env": os.environ["RLINF_ACTORS_CODE_HASH"],
                "dir": os.environ["RLINF_ACTORS_CODE_DIR"],
            }

        def launch_below(self):
            cluster = Cluster()
            group = Teller.create_group().launch(cluster, NodePlacementStrategy([0]), name="below")
            try:
                return group.tell().wait(60)[0]
            finally:
                group.shutdown()
"""
DRIVER = """
    import json
    import os
    import signal
    import subprocess
    import sys
    from rlinf_actors import Cluster, NodePlacementStrategy
    from rlinf_actors.group.provision import provisioner
    from code_of_workers import Teller

    config = {"num_nodes": 1, "runtime": {"working_dir": ".", "excludes": ["skipped/"]}}
    with Cluster(cluster_cfg=config) as cluster:
        def launch(name):
            group = Teller.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name=name)
            told = group.tell().wait(60)
            info = [one.info.code_hash for one in group.worker_info_list]
            delivery = provisioner(cluster).deliveries[0]
            sent = {"files": delivery.files, "bytes": delivery.bytes}
            print("RESULT " + json.dumps({"told": told, "info": info, **sent}))
            return group

        first = launch("first")
        with open("lib/helper.py", "w") as file:
            file.write("VALUE = 'second'")
        second = launch("second")
        (host,) = [group for group in cluster.runtime.groups.all() if group.name.startswith("code@")]
        os.kill(host.states[0].pid, signal.SIGKILL)
        host.gone.wait(30)
        launch("third")  # by another host
        command = [sys.executable, "-m", "rlinf_actors.cli.main", "workers", "--json", "--head", cluster._endpoint]
        listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print("RESULT " + json.dumps({one["name"]: one["code"] for one in listed}))
        print("RESULT " + json.dumps({"told": first.tell().wait(60)}))
        print("RESULT " + json.dumps({"told": second.execute_on(0).launch_below().wait(90)}))
"""


def project(place: Path) -> Path:
    files = {
        "code_of_workers.py": CODE, "driver.py": DRIVER, "lib/__init__.py": "", "lib/helper.py": "VALUE = 'first'",
        "data.txt": "data", "skipped/big.bin": "0" * (20 << 20),
    }  # fmt: skip
    for name, text in files.items():
        path = place / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return place / "project"


def run(directory: Path, cache: Path, **more: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    env = {**os.environ, "RLINF_ACTORS_CACHE_DIR": str(cache), **more}
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=directory, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line) for line in lines], done


def test_changed_code_is_run_by_the_next_launch(tmp_path):
    directory = project(tmp_path)
    results, done = run(directory, tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third, listed, first_again, below = results
    assert [one["value"] for one in first["told"]] == ["first", "first"]
    assert [one["value"] for one in second["told"]] == ["second", "second"]
    assert [one["value"] for one in first_again["told"]] == ["first", "first"]  # they go on with their code
    assert first["files"] == 5  # skipped/ is not among them
    assert (second["files"], second["bytes"]) == (1, len("VALUE = 'second'"))
    assert (third["files"], third["bytes"]) == (0, 0)
    for result in (first, second):
        for told, info in zip(result["told"], result["info"], strict=True):
            assert told["hash"] == told["env"] == info
            assert len(info) == 64
            assert told["dir"] == told["cwd"] == str(tmp_path / "cache" / "code" / "trees" / info)
            assert told["file"] == f"{told['dir']}/lib/helper.py"
            assert told["data"] == "data"
    assert first["info"][0] != second["info"][0] == third["info"][0]
    assert (listed["first:0"], listed["third:1"]) == (first["info"][0], third["info"][0])
    assert below["told"][0] == second["told"][0]  # a worker sends on what it runs
    assert f"worker second:1 runs code {second['info'][0][:12]}" in done.stdout + done.stderr


def test_file_that_cannot_be_sent_fails_the_launch_by_name(tmp_path):
    directory = project(tmp_path)
    (directory / "model.pt").write_bytes(bytes(17 << 20))
    _, done = run(directory, tmp_path / "cache")
    assert done.returncode == 1
    assert "ConfigError: cluster.runtime.working_dir" in done.stderr
    assert "model.pt (17.0 MiB)" in done.stderr


def test_code_that_a_node_does_not_take_fails_the_launch(tmp_path):
    _, done = run(project(tmp_path), tmp_path / "cache", RLINF_ACTORS_CODE_FILES="3")
    assert done.returncode == 1
    assert "WorkerStartError" in done.stderr
    assert "cannot be sent to node 0" in done.stderr
    assert "more than 3 files" in done.stderr
    assert not list((tmp_path / "cache" / "code" / "incoming").iterdir())


DIES = """
    import os
    import signal
    from rlinf_actors import Cluster, NodePlacementStrategy
    from rlinf_actors.group import provision
    from code_of_workers import Teller

    read, count = provision._SliceReader.next, int(os.environ["SLICES"])

    def next_slices(reader):
        global count
        count -= 1
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(reader)

    provision._SliceReader.next = next_slices
    with Cluster(cluster_cfg={"num_nodes": 1, "runtime": {"working_dir": ".", "max_file_mb": 30}}) as cluster:
        group = Teller.create_group().launch(cluster, NodePlacementStrategy([0]), name="tellers")
        group.wait_ready(60)
        done = provision.provisioner(cluster).deliveries[0]
        print(f"RESULT [{done.files}, {done.bytes}]")
"""


def test_transfer_of_a_driver_that_died_goes_on_with_the_next(tmp_path):
    directory = project(tmp_path)
    (directory / "driver.py").write_text(textwrap.dedent(DIES))
    for name in ("x", "y"):
        (directory / name).write_bytes(name.encode() * (4 << 20))
    _, died = run(directory, tmp_path / "cache", SLICES="12")  # x has arrived, whatever is on its way
    assert died.returncode == -9, died.stderr
    (sent,), done = run(directory, tmp_path / "cache", SLICES="-1")
    assert done.returncode == 0, done.stderr
    assert 0 < sent[1] < (20 << 20) + (4 << 20) + 2000  # not skipped/big.bin, x and y
    assert os.listdir(tmp_path / "cache" / "code" / "incoming") == []


ASYNC = """
    import asyncio
    import json
    import time
    from rlinf_actors import Cluster, NodePlacementStrategy
    from code_of_workers import Teller

    async def main():
        async with Cluster.connect(cluster_cfg={"num_nodes": 1, "runtime": {"working_dir": "."}}) as cluster:
            began = time.monotonic()
            group = Teller.create_group().launch(cluster, NodePlacementStrategy([0]), name="tellers")
            waited = time.monotonic() - began
            told = group.tell()  # queued until the code is there
            print("RESULT " + json.dumps({"told": await told, "waited": waited}))
            with open("model.pt", "wb") as file:
                file.truncate(17 << 20)
            bad = Teller.create_group().launch(cluster, NodePlacementStrategy([0]), name="bad")
            try:
                await bad
            except Exception as error:
                print("RESULT " + json.dumps({"error": f"{type(error).__name__}: {error}"}))

    asyncio.run(main())
"""


def test_launch_in_an_event_loop_does_not_wait_for_the_transfer(tmp_path):
    directory = project(tmp_path)
    (directory / "skipped" / "big.bin").unlink()
    (directory / "driver.py").write_text(textwrap.dedent(ASYNC))
    (told, failed), done = run(directory, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert told["told"][0]["value"] == "first"
    assert told["waited"] < 0.5  # the host alone takes longer to start
    assert failed["error"].startswith("ConfigError: cluster.runtime.working_dir")
