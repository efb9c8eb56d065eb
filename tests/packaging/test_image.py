"""The image of examples/container is built and run by a container engine, alone, by compose and in pods.

Only with ``--engine podman``, ``--engine docker``, or ``--engine any`` for the first of them that works: the build
fetches packages and takes minutes. `test_containers` checks the same files without an engine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pace
import pytest
from container_engine import BASE, EXAMPLES, LOCKED, Engine, Pod, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
TOOL = (sys.executable, "-m", "rlinf_actors.cli.main")
BUSY = """
from __future__ import annotations
import subprocess
import time
from rlinf_actors import Cluster, NodePlacementStrategy, Worker

class Busy(Worker):
    def leave_an_orphan(self):
        subprocess.run(["sh", "-c", "sleep 0.1 & exit"], check=True)

    def work(self):
        time.sleep(600)

if __name__ == "__main__":
    group = Busy.create_group().launch(Cluster(), NodePlacementStrategy([0]))
    group.leave_an_orphan().wait()
    print("busy", flush=True)
    group.work().wait()
"""
ZOMBIES = "grep -l '^State:.Z' /proc/[0-9]*/status"


@pytest.fixture(scope="module")
def engine(pytestconfig: pytest.Config) -> Engine:
    asked = pytestconfig.getoption("engine")
    if not asked:
        pytest.skip("needs --engine podman or --engine docker")
    for engine in map(Engine, ("podman", "docker") if asked == "any" else (asked,)):
        if engine.works():
            if not engine.has_base():
                pytest.skip(f"{engine.name} neither has the image {BASE} nor can it fetch it")
            tried = engine.attempt("run", "--rm", BASE, "true")
            if tried.returncode != 0:
                pytest.skip(f"{engine.name} cannot run a container here: {tried.stderr}")
            return engine
    pytest.skip("no container engine works here: podman info, docker info")


@pytest.fixture(scope="module")
def image(engine: Engine) -> Iterator[str]:
    with engine.image() as name:
        yield name


@pytest.fixture
def busy(tmp_path: Path) -> str:
    """The option that shows a container a program whose worker is busy."""
    tmp_path.chmod(0o755)
    (tmp_path / "busy.py").write_text(BUSY)
    return f"--volume={tmp_path}/busy.py:/app/busy.py:ro"


def test_image_runs_a_program_without_privileges(engine, image):
    assert engine.run("run", "--rm", *LOCKED, image, "id", "--user") == "1000\n"
    assert engine.run("run", "--rm", *LOCKED, image, "rlinf-actors", "--version").startswith("rlinf-actors, version")
    given = f"--volume={EXAMPLES}/container/train.py:/app/train.py:ro"
    command = ("rlinf-actors", "run", "--", "python", "/app/train.py")
    assert engine.run("run", "--rm", *LOCKED, given, image, *command) == "[0]\n"


@pytest.mark.parametrize("options", [("--init",), ()], ids=["init", "as process 1"])
def test_stopped_container_ends_its_workers_in_time_and_leaves_no_zombie(engine, image, busy, options):
    command = ("rlinf-actors", "run", "--", "python", "/app/busy.py")
    with engine.container(*LOCKED, *options, busy, image, *command) as container:
        assert pace.again_like(lambda: "busy" in engine.log(container), True), engine.log(container)
        find = ("exec", container, "sh", "-c", ZOMBIES)
        assert pace.again_like(lambda: engine.run(*find, check=False), "") == ""
        assert engine.stop(container) == "143"  # of the program, which SIGTERM ended


def compose_of(engine: Engine) -> list[str]:
    """The program that reads compose files for this engine."""
    profiled = shutil.which("podman-compose") is not None and "--profile" in run("podman-compose", "--help").stdout
    if engine.name == "podman" and profiled:  # Debian 12's 1.0.3 is not
        return ["podman-compose"]
    if engine.name == "docker" and run("docker", "compose", "version").returncode == 0:
        return ["docker", "compose"]
    pytest.skip(f"{engine.name} has no compose here that knows profiles")


def test_compose_file_makes_a_cluster_and_down_leaves_nothing(engine, image, tmp_path):
    compose, project = compose_of(engine), f"rlinf-test-{os.getpid()}"
    given = (EXAMPLES / "container" / "compose.yaml").read_text()
    assert given.count("image: rlinf-actors\n") == 1
    (tmp_path / "compose.yaml").write_text(given.replace("image: rlinf-actors\n", f"image: {image}\n"))
    shutil.copy(EXAMPLES / "container" / "train.py", tmp_path)
    keys = [("keys", "init", "--dir", "keys/head")]
    for name in ("node1", "node2"):
        keys.append(("keys", "enroll", name, "--state-dir", "state", "--file", f"keys/{name}/agent.key"))
    environment = {**os.environ, "RLINF_ACTORS_KEYS": "keys/head"}
    for node in ("node1", "node2"):
        (tmp_path / "keys" / node).mkdir(mode=0o700, parents=True)
    for words in keys:
        assert run(*TOOL, *words, cwd=tmp_path, env=environment).returncode == 0
    for path in (*tmp_path.glob("keys/**/*"), *tmp_path.glob("state/**/*"), tmp_path / "keys", tmp_path / "state"):
        os.chown(path, 1000, 1000)

    def tell(*words: str) -> str:
        done = run(*compose, "-p", project, *words, cwd=tmp_path, timeout=2 * pace.PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def left(*kind: str) -> list[str]:
        return engine.run(*kind, "--quiet", "--filter", f"label=com.docker.compose.project={project}").split()

    try:
        tell("up", "--detach")
        assert "[0, 1]" in tell("--profile", "train", "run", "--rm", "train")
        tell("stop")
        containers = left("ps", "--all")
        assert [engine.exit_code(container) for container in containers] == ["0"] * 3
    finally:
        tell("down")
    assert left("ps", "--all") == left("network", "ls") == []


def test_manifests_pods_run_a_program_and_stop_in_time(engine, image, tmp_path):
    if engine.name != "podman":
        pytest.skip("only podman plays pods")
    assert run(*TOOL, "keys", "init", "--dir", "keys", cwd=tmp_path).returncode == 0
    own = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    network = f"rlinf-test-{os.getpid()}"
    changes = {"rlinf-actors:latest": image, "memory: 16Gi": "memory: 64Mi"}
    with ExitStack() as stack:
        engine.run("network", "create", network)
        stack.callback(engine.run, "network", "rm", "--force", network)

        def start(file: str, kind: str, name: str, keys: dict[str, bytes], more: dict[str, str] | None = None) -> Pod:
            pod = Pod(engine, tmp_path, (file, kind), name, keys, {**changes, **(more or {})})
            return stack.enter_context(pod.running(network))

        def enroll(name: str, *role: str) -> bytes:
            made = head.exec("rlinf-actors", "keys", "enroll", name, *role, "--file", f"/tmp/{name}.key")
            assert made.returncode == 0, made.stderr
            return head.exec("cat", f"/tmp/{name}.key").stdout.encode()

        head = start("head.yaml", "StatefulSet", "head", own)
        assert pace.again_like(head.is_ready, True), engine.log(head.container)
        agent = start("agents.yaml", "DaemonSet", "gpu-1", {"gpu-1.key": enroll("gpu-1")})
        assert pace.again_like(agent.is_ready, True), engine.log(agent.container)
        shutil.copy(EXAMPLES / "container" / "train.py", tmp_path)
        (tmp_path / "Dockerfile").write_text(f"FROM {image}\nCOPY train.py /app/train.py\n")
        stack.callback(engine.run, "rmi", "--force", f"{image}-train", check=False)
        engine.run("build", "--tag", f"{image}-train", "--file", str(tmp_path / "Dockerfile"), str(tmp_path))
        here = {image: f"{image}-train", "value: '2'": "value: '1'"}
        train = start("train.yaml", "Job", "train", {"driver.key": enroll("train", "--driver")}, here)
        assert engine.run("wait", train.container).strip() == "0", engine.log(train.container)
        assert "[0]" in engine.log(train.container)
        # the head first: then the name service does not know it any more, and agentd has to end all the same
        assert [engine.stop(pod.container) for pod in (head, agent)] == ["0", "0"]
