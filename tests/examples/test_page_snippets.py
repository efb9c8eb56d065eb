"""Python blocks of pages that are no programs run: those of a page in their order, in one session of a driver.

All pages share a cluster of two nodes with an arm each. SNIPPETS says what a page takes for granted, and what must hold
after a block. A block that cannot run says so in its page (tests/page_blocks.py). tests/typing checks the types of all.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pace
import page_blocks
import pytest

from rlinf_actors import Cluster, ComponentPlacement, Identity
from rlinf_actors.testing import LocalCluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]  # a page launches up to 8 groups

ARMS = [{"node_rank": rank, "robot_ip": f"10.10.10.{rank + 1}", "disable_validate": True} for rank in range(2)]
CONFIG = {
    "num_nodes": 2,
    "component_placement": {"arms": {"node_group": "arms", "placement": "0-1"}},
    "node_groups": [{"label": "arms", "node_ranks": "0-1", "hardware": {"type": "Franka", "configs": ARMS}}],
}
ALL = """
import ctypes, logging, multiprocessing, os, subprocess, threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import numpy as np
from rlinf_actors import *
from rlinf_actors.testing import LocalCluster
class Arm:
    said = []
    def __init__(self, address): self.address = address
    def stop(self): self.said.append("stop")
    def close(self): self.said.append("close")
    def fileno(self): return 0
def connect(address): return Arm(address)
"""
HOOK, OUTSIDE = "self.on_lease_lost()", "self.stop_hardware(self.hardware_infos)"
DRIVEN = """
class Driven(Env):
    def ask(self): return self.arm.address
    def end(self):
        {stop}
        return self.arm.said
envs = Driven.create_group().launch(cluster, on_arms, name="envs")
assert envs.ask().wait() == ["10.10.10.1", "10.10.10.2"]
assert envs.end().wait() == [["stop"]] * 2
envs.shutdown()
"""
SNIPPETS: dict[str, dict[int, str]] = {
    "README": {
        0: """
            class Actor(Worker):
                def __init__(self, config=None): ...
                def ask(self): return self._rank
            Path("conf.yaml").write_text("cluster: {num_nodes: 2, component_placement: {actor: 0-1}}")
            config, connected = None, cluster
            def Cluster(**given): return connected
            """,
        3: "assert actors.ask().wait() == [0, 1]\nactors.shutdown()",
        4: DRIVEN.format(stop=OUTSIDE),
        5: "assert group.ask().wait() == [0]",
    },
    "robot-safety": {
        0: """
            class Dashboard(Arm):
                def __enter__(self): return self
                def __exit__(self, *error): ...
            Path("arm_bridge").write_text("#!/bin/sh\\ncat > stopped\\n")
            os.chmod("arm_bridge", 0o755)
            address, here = "can0", os.getcwd()
            """,
        2: DRIVEN.format(stop=OUTSIDE),
        3: DRIVEN.format(stop=HOOK),
        4: """
            class Bridged(Env):
                def __init__(self):
                    os.environ["PATH"] += f":{here}"
                    super().__init__()
                def end(self): self.on_lease_lost()
            bridged = Bridged.create_group().launch(cluster, on_arms, name="bridged")
            bridged.execute_on(0).end().wait()
            bridged.shutdown()
            """,
    },
    "attach-a-debugger": {
        0: "os.environ['PYTHONBREAKPOINT'] = '0'",
        1: """
            class Loss:
                def backward(self): print("backward")
            class Trained(Actor):
                def model(self, batch): return Loss()
            Trained.create_group().launch(cluster).step(1).wait()
            del os.environ["PYTHONBREAKPOINT"]
            """,
    },
    "call-workers": {
        0: """
            class Stepper(Worker):
                def step(self, x, lr=0.0): return x
                def score(self, path): return len(path)
                def rollout(self): return "a rollout"
                def rollouts(self, n): yield from range(n)
            async def arriving():
                for path in paths: yield path
            Scorer, Rollout, x, paths, paths_as_they_come = Stepper, str, 1, ["a", "bb", "ccc"], arriving()
            group = Stepper.create_group().launch(cluster, NodePlacementStrategy([0] * 4 + [1] * 4), name="steppers")
            """,
        1: "assert (totals, first) == ([6], 10)",
        2: "group = group.execute_on(0, 1, 2, 3)",
        3: "assert losses == [[0, 1], [2, 3], [4, 5], [6, 7]]",
        8: """
            trainer = Trainer.create_group().launch(cluster)
            training = trainer.train()
            assert trainer.progress().wait()[0] >= 0
            trainer.stop().wait()
            training.wait()
            """,
    },
    "read-logs": {1: "Actor.create_group().launch(cluster).shutdown()"},
    "resize-groups": {
        0: """
            class Rollout(Worker):
                def __init__(self, model): ...
                def step(self): return self._world_size
            model, strategy = None, NodePlacementStrategy
            def NodePlacementStrategy(nodes): return strategy([node % 2 for node in nodes])
            """,
        1: "assert (ranks, group.step().wait()) == ([2, 3], [2, 2])",
        2: """
            trainer = Trainer.create_group().launch(cluster, strategy([0]))
            trainer.add_ranks(strategy([1]))
            trainer.shutdown()
            """,
    },
    "send-messages": {
        0: """
            class Trainer(Worker):
                def serve(self):
                    self.send("weights", "rollout", 0)
                    return self.recv("rollout", 0)
            trajectories, first = [1, 2], NodePlacementStrategy([0])
            states, tasks = np.arange(64.0), ["pick"] * 64
            class Tensor: ...
            """,
        1: """
            trainer = Trainer.create_group().launch(cluster, first, name="trainer")
            rollout = Rollout.create_group().launch(cluster, NodePlacementStrategy([1]), name="rollout")
            running = rollout.run()
            assert trainer.serve().wait() == [[1, 2]]
            running.wait()
            rollout.shutdown()
            """,
        2: """
            class Acting(Rollout):
                def predict(self, obs): return obs["states"] + 1
            env = Env.create_group().launch(cluster, first, name="env")
            rollout = Acting.create_group().launch(cluster, NodePlacementStrategy([1]), name="rollout")
            channel = Channel.create("routed")
            stepping = env.step(channel)
            rollout.step(channel).wait()
            stepping.wait()
            rollout.shutdown()
            """,
        3: """
            actor = Actor.create_group().launch(cluster, first, name="actor")
            rollout = Rollout.create_group().launch(cluster, NodePlacementStrategy([1]), name="rollout")
            rollout.start().wait()
            actor.sync({"w": np.zeros(3)}).wait()
            """,
    },
    "set-up-robots": {
        1: """
            class Driven(Env):
                def ask(self): return self.robot.address
                def on_lease_lost(self): ...
            assert Driven.create_group().launch(cluster, on_arms).ask().wait() == ["10.10.10.1", "10.10.10.2"]
            """,
    },
    "share-groups": {
        0: """
            class Sampler(Worker):
                def sample(self, n): return [0] * n
            class Model(Worker):
                def __init__(self, version): ...
                def predict(self, x): return x
            x, sampler = 1, Sampler.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="samplers")
            def Cluster(head, namespace): return cluster
            """,
        1: "assert trainer.step().wait() == [2]",
    },
    "share-hardware": {
        0: """
            class Model:
                def to(self, device): assert device == "cuda"
            """,
        1: "in_worker(NodePlacementStrategy([0]), model=Model())",
    },
    "stop-robots": {
        0: """
            class Loop:
                def stream(self, page, arm): assert (page.value, arm) != (0, -1)
            loop = Loop()
            """,
        1: "in_worker(on_arms, arm=Arm(''))",
    },
    "survive-failures": {
        0: """
            import signal
            class Actor(Worker):
                def __init__(self, config): ...
                def die(self): os.kill(os.getpid(), signal.SIGKILL)
            class MyWorker(Worker): ...
            config = None
            Path("a").write_text("stored")
            here = os.getcwd()
            """,
        1: """
            try:
                group.die().wait()
            except WorkerDiedError:
                pass
            group.shutdown()
            """,
        2: "assert values == [b'stored']",
        3: """
            class Dying(Worker):
                def __init__(self): os.kill(os.getpid(), signal.SIGKILL)
            again = RestartPolicy.on_failure(max_restarts=100, backoff_s=0.2)
            dying = Dying.create_group().launch(cluster, restart=again)
            class Seen(Exception): ...
            def print(text, tail): raise Seen(text)  # ends the loop, which would wait for the next event
            """,
        4: "assert 'SIGKILL' in str(seen)\ndying.shutdown()",
    },
    "trace-a-job": {
        0: "def preprocess(): print('preprocessed')",
        1: "postprocess()",
    },
    "train-a-policy": {
        0: """
            import contextlib
            nodes, workers, shared = 2, 3, cluster
            class LocalCluster(contextlib.nullcontext):
                def __enter__(self): return self
                def cluster(self): return contextlib.nullcontext(shared)
            """,
        4: "Worker.create_group().launch(cluster, places).shutdown()",
    },
    "use-channels": {
        0: """
            class Mine(Worker):
                def run(self, channel):
                    for _ in range(2):  # enough for a batch, whether the page's item comes before them or behind
                        channel.put("weighs enough", weight=4096, key="left")
                    for number in range(70):  # more than the channel holds: the last ones wait for the loop
                        channel.put(number)
                    channel.close()
            async def process(item): ...
            log, rollout = logging.getLogger(), [1, 2]
            group = Mine.create_group().launch(cluster, NodePlacementStrategy([1]))
            """,
        1: "assert (len(batch), item) == (1, 69)",
    },
}
"""By page: what its blocks take for granted (0), and what must hold after a block, by its number in the page.

`on_arms` places a worker on each arm. Of the pages OF_WORKERS, `in_worker` runs the block's lines in
a method of a worker.
"""
OF_WORKERS = {"share-hardware", "stop-robots"}
PAGE_OF = {path.stem: path for path in page_blocks.PAGES}


def blocks(page: str) -> dict[int, page_blocks.Block]:
    """The blocks of a page that are no programs and run, by number from 1."""
    found = dict(enumerate(page_blocks.blocks(PAGE_OF[page], "python"), 1))
    first = 3 if page == "README" else 1  # its first two are a program: test_page_programs.py
    return {n: one for n, one in found.items() if n >= first and one.reason is None and one.file is None}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of this module's driver and workers."""
    place = tmp_path_factory.mktemp("pages")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture(scope="module")
def local(place: Path) -> Iterator[LocalCluster]:
    with LocalCluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with local.cluster(cluster_cfg=CONFIG, namespace="pages") as made:
        yield made


def run(text: str, names: dict[str, Any], where: str) -> None:
    """Run a block. One with `await` runs in an event loop, as in a coroutine."""
    done = eval(compile(text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(done):
        asyncio.run(done)


def in_worker(text: str, names: dict[str, Any], places: object, **attributes: object) -> None:
    """Run the lines of a block in a method of a worker that has *attributes*."""
    method = textwrap.indent(f"async def lines(self):\n{textwrap.indent(text, '    ')}", "    ")
    run(f"class Mine(Worker):\n{method}\n    def on_lease_lost(self): ...\n", names, "a worker")
    made = type("Mine", (names["Mine"],), attributes).create_group().launch(names["cluster"], places)
    made.lines().wait()
    made.shutdown()


@pytest.mark.parametrize("page", SNIPPETS)
def test_blocks_of_a_page_run(page: str, cluster: Cluster) -> None:
    names: dict[str, Any] = {"cluster": cluster, "__name__": page}
    names["on_arms"] = ComponentPlacement({"cluster": CONFIG}, cluster).get_strategy("arms")
    run(ALL + textwrap.dedent(SNIPPETS[page].get(0, "")), names, page)
    for number, block in blocks(page).items():
        if page in OF_WORKERS:
            names["in_worker"] = functools.partial(in_worker, block.text, names)
        else:
            try:
                run(block.text, names, block.where)
            except names.get("Seen", ()) as seen:
                names["seen"] = seen
        run(textwrap.dedent(SNIPPETS[page].get(number, "")), names, f"behind {block.where}")
    for group in cluster.runtime.groups.all():
        if group.owned and not group.gone.done():
            cluster.runtime.io.submit(cluster.runtime.groups.stop(group, 0.0)).result(pace.PATIENCE_S)


def program(text: str, folder: Path, **env: str) -> str:
    """Run a program of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, env={**os.environ, **env}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lines_of_use_asyncio_run(local: LocalCluster, tmp_path: Path) -> None:
    """Its first block has lines for drivers and, with `self`, for workers. The last one ends its cluster."""
    block, bring_up = blocks("use-asyncio").values()
    driver, worker = ([one for one in block.lines if ("self." in one) is inside] for inside in (False, True))
    text = f"""
import asyncio
from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker, WorkerGroup

class Env(Worker):
    pass

class Actor(Worker):
    async def step(self): return 1
    async def lines(self):
{textwrap.indent(chr(10).join(worker), " " * 8)}
        return alive, info.address.get_name()

async def main():
    cluster = Cluster(num_nodes=2, namespace="asyncio")
    Actor.create_group().launch(cluster, NodePlacementStrategy([0] * 4), name="actors")
    await Channel.create("rollouts").put(7, async_op=True)
{textwrap.indent(chr(10).join(driver[:-1]), " " * 4)}
    [(alive, name), *_] = await group.lines()
    print(len(nodes), item, alive, name, seconds > 0)
    strategy = NodePlacementStrategy([0])
{textwrap.indent(bring_up.text, " " * 4)}
    {driver[-1]}

asyncio.run(main())
"""
    env = {**local.driver_env, "RLINF_HEAD": local.head}
    assert program(text, tmp_path, **env) == "2 7 True actors:3 True\n"


def test_hardware_of_a_page_is_found(tmp_path: Path) -> None:
    """add-hardware.md: in a process of its own, which knows the vendor and the arm until its end."""
    vendor, arm, known = (block.text for block in page_blocks.blocks(PAGE_OF["add-hardware"], "python"))
    tool = tmp_path / "mytpu-smi"
    tool.write_text("#!/bin/sh\nprintf '0,a\\n1,b\\n'\n")
    tool.chmod(0o755)
    text = f"""{vendor}
import os
register()
print([info.index for info in find({{"PATH": os.environ["PATH"], "MY_TPU_VISIBLE_DEVICES": "1"}}).infos])
from collections.abc import Sequence
from dataclasses import dataclass
from rlinf_actors import HardwareConfig, HardwareInfo, HardwareResource, Hardware, NodeHardwareConfig
def ask(port, command): return "serial of " + port
{arm}
print(DeskArm.enumerate(0, [DeskArmConfig(node_rank=0, port="/dev/arm")]).infos[0].identity)
{known}
print([known(HardwareInfo("Arm", "v1"), 1, where).identities for where in ("/dev/arm", "can0", "127.0.0.1")])
"""
    out = program(text, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    found = [[Identity("/dev/arm", 1)], [Identity("can0", 1)], [Identity("localhost", 1)]]
    assert out == f"[1]\nserial of /dev/arm\n{found}\n"


def test_vector_environment_of_a_page_runs(local: LocalCluster, tmp_path: Path) -> None:
    """The first block of use-gymnasium-lerobot-ros.md, with two workers instead of 16."""
    pytest.importorskip("gymnasium")
    block = blocks("use-gymnasium-lerobot-ros")[1]
    text = block.text.replace("[make] * 64", "[make] * 4").replace("[0] * 8 + [1] * 8", "[0, 1]")
    assert text != block.text
    env = {**local.driver_env, "RLINF_HEAD": local.head}
    folder = page_blocks.ROOT / "examples" / "gymnasium_vector"
    program(f"{text}assert observations.shape == (4, 4)\n", tmp_path, PYTHONPATH=str(folder), **env)
