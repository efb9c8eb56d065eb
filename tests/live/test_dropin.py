"""A program written for RLinf runs on rlinf_actors.dropin: driver, workers of two interpreters, and their children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import environments
import live_workers as lw
import pytest

from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

PROGRAM = {
    "checkout/rlinf/__init__.py": "from .utils import THEIRS",
    "checkout/rlinf/utils/__init__.py": "THEIRS = 'theirs'",
    "checkout/rlinf/scheduler/__init__.py": "raise RuntimeError('the scheduler of the checkout was loaded')",
    "checkout/rlinf/workers.py": """
        import multiprocessing
        import subprocess
        import sys

        from rlinf.scheduler import Channel, Worker
        from rlinf.utils import THEIRS

        def report(queue):
            from rlinf.scheduler.worker.worker import Worker as Again
            queue.put(Again.__module__)

        class Base(Worker):
            def __init__(self, cfg):
                super().__init__()
                self.cfg = cfg

            def look(self):
                import rlinf.scheduler.cluster.cluster as cluster
                import ray
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                child = context.Process(target=report, args=(queue,))
                child.start()
                spawned = queue.get(timeout=60)
                child.join()
                line = "import ray, rlinf.scheduler.worker as w; print(w.Worker.__module__, ray.is_initialized())"
                started = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
                return {
                    "python": sys.executable,
                    "here": cluster.Cluster.__module__,
                    "theirs": THEIRS,
                    "spawned": spawned,
                    "started": started.stdout.split() or started.stderr,
                    "ip": ray.util.get_node_ip_address(),
                    "same": isinstance(self, Worker) and self.cfg.value == 7,
                }
        """,
    "conf/conf.yaml": """
        value: 7
        cluster:
          num_nodes: 2
          component_placement: {first: {node_group: one, placement: 0}, second: {node_group: two, placement: 0}}
          node_groups:
            - label: one
              node_ranks: 0
              env_configs: [{node_ranks: 0, env_vars: [{PYTHONPATH: "${oc.env:CHECKOUT}"}]}]
            - label: two
              node_ranks: 1
              env_configs:
                - node_ranks: 1
                  python_interpreter_path: ${oc.env:OTHER}
                  env_vars: [{PYTHONPATH: "${oc.env:CHECKOUT}"}]
        """,
    "train.py": """
        import json
        import hydra
        import ray.util
        from ray.util.queue import Empty, Queue
        from rlinf.scheduler import Cluster, ComponentPlacement
        from rlinf.workers import Base

        class Local(Base):
            def fill(self, queue):
                queue.put(sorted(range(self.cfg.value)))
                return queue.qsize()

        @hydra.main(version_base=None, config_path="conf", config_name="conf")
        def main(cfg):
            cluster = Cluster(cluster_cfg=cfg.cluster)
            placement = ComponentPlacement(cfg, cluster)
            groups = [
                Local.create_group(cfg).launch(cluster, name=name, placement_strategy=placement.get_strategy(name))
                for name in ("first", "second")
            ]
            print(json.dumps([group.look().wait()[0] for group in groups]))
            queue = Queue(maxsize=2)
            print(groups[0].fill(queue).wait(), queue.get(), queue.empty())
            try:
                queue.get(block=False)
            except Empty:
                print("Empty")
            queue.shutdown()

        if __name__ == "__main__":
            main()
        """,
}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    for name, text in PROGRAM.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lw.dedent(text))
    return tmp_path


def test_a_hydra_program_of_rlinf_runs_unchanged_on_two_interpreters(program):
    other = environments.without(program / "other", "rlinf_actors", "_rlinf_actors", "agentd", "hydra")
    with LocalCluster(2) as local:
        checkout = str(program / "checkout")
        paths = os.pathsep.join([checkout, lw.SCRIPT_ENV["PYTHONPATH"]])
        done = subprocess.run(
            [sys.executable, "-m", "rlinf_actors.dropin", "train.py", "hydra.run.dir=out", "+more=1"],
            capture_output=True,
            text=True,
            check=False,
            cwd=program,
            env={**os.environ, **local.driver_env, "PYTHONPATH": paths, "OTHER": other, "CHECKOUT": checkout},
        )
        assert done.returncode == 0, done.stderr
    looks, queue, empty = done.stdout.splitlines()
    where = [(sys.executable, "127.0.0.1"), (other, "127.0.0.2")]
    for look, (python, ip) in zip(json.loads(looks), where, strict=True):
        assert look == {
            "python": python,
            "here": "rlinf_actors.cluster.cluster",
            "theirs": "theirs",
            "spawned": "rlinf_actors.worker.worker",
            "started": ["rlinf_actors.worker.worker", "False"],
            "ip": ip,
            "same": True,
        }
    assert (queue, empty) == ("[1] [0, 1, 2, 3, 4, 5, 6] True", "Empty")
