"""Nodes as their agents report them: broken vendors, lists of visible devices, a vendor that a package adds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
from vendor_kit import Tree, capture

from rlinf_actors.cli.queries import fetch_status
from rlinf_actors.settings import Settings

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[2]


@pytest.fixture
def short() -> Iterator[Path]:
    """A short directory for sockets: pytest's own are too long for them."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as path:
        yield Path(path)


@contextlib.contextmanager
def node(directory: Path, environ: dict[str, str], config: str = "") -> Iterator[str]:
    """A head with one node, started with exactly this environment; the head's address."""
    (directory / "agentd.toml").write_text(config)
    read, write = os.pipe()
    command = [sys.executable, "-m", "agentd", "--config", str(directory / "agentd.toml"), "--head", "--listen",
               "127.0.0.1:0", "--run-dir", str(directory / "run"), "--log-dir", str(directory / "log"),
               "--ready-fd", str(write)]  # fmt: skip
    env = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory / "state"), **environ}
    agent = subprocess.Popen(command, env=env, pass_fds=(write,), stderr=subprocess.DEVNULL)
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            told = json.loads(pipe.readline() or "{}")
        yield told["head"]
    finally:
        agent.terminate()
        agent.wait(pace.PATIENCE_S)


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
    with node(short, {**tree.environ, **hangs}, "[hardware]\nprobe_timeout_s = 20\n") as head:
        report = fetch_status(head, Settings.load(tree.environ)).nodes[0].report
        assert [(found.type, len(found.infos)) for found in report.resources] == [("AMD_GPU", 2)]
        said = {fault.partition(": ")[0]: fault.partition(": ")[2] for fault in report.faults}
    assert said.keys() == {"NV_GPU", "NPU", "MUSA_GPU", "KUNLUN_XPU"}
    assert said["NV_GPU"].startswith(
        "the vendor's library gave no answer within 20 s in nvmlInitWithFlags; it was killed"
    )
    assert "[hardware] probe_timeout_s; NVIDIA's persistence daemon" in said["NV_GPU"]
    assert said["NPU"].startswith("npu-smi info gave no answer within ")
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
        return os.environ["{variable}"]

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
def test_workers_get_the_devices_that_the_nodes_list_leaves(
    short: Path, fake_nvml: Path, tmp_path: Path, devices: str, value: str, seen: str
) -> None:
    env = {
        **Tree(tmp_path / "root").environ,
        "LD_LIBRARY_PATH": str(fake_nvml),
        "CUDA_VISIBLE_DEVICES": value,
        **({"FAKE_NVML_DEVICES": devices} if devices else {}),
    }
    done = driver(short, SCRIPT.format(variable="CUDA_VISIBLE_DEVICES"), env)
    assert done.stdout.strip() == seen, done.stderr


LAB = """
from rlinf_actors import AcceleratorFacts, AcceleratorInfo, AcceleratorUtil, FoundAccelerators

def register():
    facts = AcceleratorFacts("LAB_TPU_VISIBLE_DEVICES", "", "labtpu", "")
    AcceleratorUtil.register_accelerator("LAB_TPU", facts, devices=("/dev/labtpu[0-9]",))(find)

def find(environ):
    return FoundAccelerators([AcceleratorInfo("LAB_TPU", "v1", index=index) for index in (4, 5)])
"""


def test_workers_on_a_vendors_devices_that_a_package_adds(short: Path, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "root")
    tree.write("/dev/labtpu0")
    (short / "lab").mkdir()
    (short / "lab" / "my_lab.py").write_text(LAB)
    with_lab = {"PYTHONPATH": f"{ROOT}:{short / 'lab'}", "RLINF_EXT_MODULE": "my_lab"}
    script = SCRIPT.format(variable="LAB_TPU_VISIBLE_DEVICES")
    with node(short, {**tree.environ, **with_lab}) as head:
        knows = driver(short, script, {**tree.environ, **with_lab, "RLINF_HEAD": head})
        assert knows.stdout.strip() == "2 4 5", knows.stderr
        ignorant = driver(short, script, {**tree.environ, "RLINF_HEAD": head})
    assert ignorant.returncode == 1
    assert "there is no accelerator type 'LAB_TPU' in this process" in ignorant.stderr
    assert "install the package that has module my_lab here, or name that module in RLINF_EXT_MODULE" in ignorant.stderr


def driver(directory: Path, script: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script with exactly this environment."""
    (directory / "script.py").write_text(script)
    env = {"PYTHONPATH": str(ROOT), "RLINF_ACTORS_RUN_DIR": str(directory), **environ}
    return subprocess.run(
        [sys.executable, str(directory / "script.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=pace.PATIENCE_S,
        check=False,
    )
