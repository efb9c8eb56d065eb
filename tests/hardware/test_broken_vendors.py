"""Nodes whose vendors' libraries hang, crash or print garbage, and nodes with a list of visible devices, as agents."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vendor_kit import Tree, capture

from rlinf_actors.cli.session import fetch_status
from rlinf_actors.settings import Settings
from rlinf_actors.wire.values import NodeReport

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[2]


@pytest.fixture
def short() -> Iterator[Path]:
    """A short directory for sockets: pytest's own are too long for them."""
    with tempfile.TemporaryDirectory(prefix="hw-") as path:
        yield Path(path)


@contextlib.contextmanager
def node(directory: Path, environ: dict[str, str], config: str = "") -> Iterator[NodeReport]:
    """A head with one node, started with exactly this environment; what the head knows of the node."""
    (directory / "agentd.toml").write_text(config)
    read, write = os.pipe()
    command = [sys.executable, "-m", "agentd", "--config", str(directory / "agentd.toml"), "--head", "--listen",
               "127.0.0.1:0", "--run-dir", str(directory / "run"), "--ready-fd", str(write)]  # fmt: skip
    env = {**environ, "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(command, env=env, pass_fds=(write,), stderr=subprocess.DEVNULL)
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            told = json.loads(pipe.readline() or "{}")
        yield fetch_status(told["head"], Settings()).nodes[0].report
    finally:
        agent.terminate()
        agent.wait(15)


def test_a_node_registers_whatever_its_vendors_libraries_do(short: Path, tmp_path: Path, fake_nvml: Path) -> None:
    tree = Tree(tmp_path / "root")
    tree.ascend()
    tree.tool("npu-smi", "signal.pause()")
    tree.moore_threads()
    tree.tool("mthreads-gmi", "os.kill(os.getpid(), signal.SIGSEGV)")
    tree.kunlun()
    tree.tool("xpu_smi", "os.write(1, bytes(range(256)) * 64)")
    tree.amd()
    tree.tool("rocm-smi", f"out({capture('rocm_smi.json')!r})")
    hangs = {"LD_LIBRARY_PATH": str(fake_nvml), "FAKE_NVML_MODE": "init=hang"}
    with node(short, {**tree.environ, **hangs}, "[hardware]\nprobe_timeout_s = 3\n") as report:
        assert [(found.type, len(found.infos)) for found in report.resources] == [("AMD_GPU", 2)]
        said = {fault.partition(": ")[0]: fault.partition(": ")[2] for fault in report.faults}
    assert said.keys() == {"NV_GPU", "NPU", "MUSA_GPU", "KUNLUN_XPU"}
    assert said["NV_GPU"].startswith(
        "the vendor's library gave no answer within 3 s in nvmlInitWithFlags; it was killed"
    )
    assert "[hardware] probe_timeout_s; NVIDIA's persistence daemon" in said["NV_GPU"]
    assert said["NPU"].startswith("npu-smi info gave no answer within 2.")
    assert said["MUSA_GPU"].startswith("mthreads-gmi -q crashed (SIGSEGV)")
    assert said["KUNLUN_XPU"].startswith("xpu_smi printed no table of XPUs: ")


GPUS = (
    "NVIDIA H100,GPU-8932f937-a,81920;MIG 1g.10gb,MIG-4c1d-a,9728;MIG 3g.40gb,MIG-77f0-b,40192;NVIDIA H100,GPU-77,81920"
)

SCRIPT = """
import os
from rlinf_actors import Cluster, Worker

class Shows(Worker):
    def show(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

cluster = Cluster(num_nodes=1)
print(cluster.num_accelerators, *Shows.create_group().launch(cluster).show().wait())
cluster.shutdown()
"""


@pytest.mark.parametrize(
    ("devices", "value", "seen"),
    [
        ("", "3,1", "2 3 1"),
        ("", "GPU-5,GPU-0", "2 5 0"),
        (GPUS, "MIG-77,MIG-4c1d-a", "2 MIG-77f0-b MIG-4c1d-a"),
        (GPUS, "GPU-7,MIG-77f0-b", "2 GPU-77 MIG-77f0-b"),
    ],
)
def test_workers_get_what_the_nodes_list_leaves(
    short: Path, fake_nvml: Path, tmp_path: Path, devices: str, value: str, seen: str
) -> None:
    (short / "script.py").write_text(SCRIPT)
    env = {
        **Tree(tmp_path / "root").environ,
        "LD_LIBRARY_PATH": str(fake_nvml),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": value,
        "RLINF_ACTORS_RUN_DIR": str(short),
        **({"FAKE_NVML_DEVICES": devices} if devices else {}),
    }
    done = subprocess.run(
        [sys.executable, str(short / "script.py")], env=env, capture_output=True, text=True, timeout=18, check=False
    )
    assert done.stdout.strip() == seen, done.stderr
