"""Two nodes with keys in two network namespaces: code reaches the other node, and only what has changed travels."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pytest
from keyed_hosts import environment, two_nodes

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(150),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

HERE = Path(__file__).resolve().parent
SECRET = "a-line-of-code-that-nobody-may-read"
PLAIN, STOP = "a-word-that-everybody-may-read", "the-sniffer-may-stop"

WORKERS = """
    import os
    from rlinf_actors import Worker
    import settings

    class Teller(Worker):
        def tell(self):
            return settings.VALUE, settings.__file__, self.worker_info.code_hash, os.getcwd()
"""
DRIVER = """
    import json
    import random
    import msgspec
    from rlinf_actors import Cluster, NodePlacementStrategy
    from rlinf_actors.group.provision import provisioner
    from workers_of_this_test import Teller

    with open("noise.bin", "wb") as file:
        file.write(random.Random(1).randbytes(5 << 20))
    config = {"num_nodes": 2, "runtime": {"working_dir": "."}}
    with Cluster(cluster_cfg=config, timeout=30) as cluster:
        results = []
        for value in (1, 2):
            with open("settings.py", "w") as file:
                file.write(f"SECRET = 'a-line-of-code-that-nobody-may-read'; VALUE = {value}")
            group = Teller.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name=f"tellers-{value}")
            told = group.tell().wait(40)
            sent = {node: msgspec.structs.asdict(one) for node, one in provisioner(cluster).deliveries.items()}
            results.append({"told": told, "sent": sent, "ips": [one.info.node_ip for one in group.worker_info_list]})
    print("RESULT " + json.dumps(results))
"""
SAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
    made.sendto(sys.argv[2].encode(), (sys.argv[1], 9))
"""


@pytest.fixture
def network() -> Iterator[list[netns_kit.Host]]:
    with netns_kit.hosts(2) as made:
        yield made


def test_changed_file_is_all_that_travels_to_the_other_node(network: list[netns_kit.Host], place: Path) -> None:
    head, far = network
    address = f"{head.ip}:6399"
    project = place / "project"
    files = {"workers_of_this_test.py": WORKERS, "driver.py": DRIVER, "settings.py": "VALUE = 0"}
    for name, text in files.items():
        project.mkdir(exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    processes: list[subprocess.Popen[str]] = []
    try:
        words = [STOP, PLAIN, SECRET]
        sniff = subprocess.Popen(
            far.command([sys.executable, str(HERE / "sniffer.py"), *words]), stdout=subprocess.PIPE, text=True
        )
        processes.append(sniff)
        assert sniff.stdout is not None
        assert sniff.stdout.readline() == "listening\n"
        processes += two_nodes(head, far, place, address)
        done = subprocess.run(
            head.command([sys.executable, "driver.py"]),
            cwd=project,
            env=environment(place, "head", RLINF_HEAD=address),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        first, second = json.loads(line.removeprefix("RESULT "))
        for result, value in ((first, 1), (second, 2)):
            assert result["ips"] == [head.ip, far.ip]
            for node, (told, file, code, cwd) in enumerate(result["told"]):
                assert told == value
                assert cwd == result["sent"][str(node)]["path"]
                assert file == f"{cwd}/settings.py"
                assert Path(cwd).name == code
            assert result["told"][0][2] == result["told"][1][2]
            output = done.stdout + done.stderr
            assert f"tellers-{value}:1 runs code {result['told'][1][2][:12]}" in output
        assert first["told"][0][2] != second["told"][0][2]
        assert first["sent"]["1"]["bytes"] > 5 << 20
        changed = (project / "settings.py").stat().st_size
        for node in ("0", "1"):
            assert (second["sent"][node]["files"], second["sent"][node]["bytes"]) == (1, changed)
            assert second["sent"][node]["listings"] < 1000
        subprocess.run(head.command([sys.executable, "-c", SAY, far.ip, f"{PLAIN} {STOP}"]), check=True)
        heard = json.loads(sniff.stdout.readline())
        assert heard["seen"] == [PLAIN]  # it would have seen the code
        assert heard["bytes"] > 5 << 20
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()
