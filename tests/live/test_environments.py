"""A node builds the environment of a node group, and its workers run in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlinf_actors import Cluster, NodePlacementStrategy, Worker, WorkerStartError

sys.path.append(str(Path(__file__).parents[1] / "codesync"))
from wheel_kit import wheel

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


class Importer(Worker):
    def version(self) -> tuple[str, str]:
        import tinypkg  # type: ignore[import-not-found]

        return tinypkg.VERSION, sys.prefix


def config(wheels: Path, *requirements: str) -> dict[str, object]:
    variables = [{"PIP_NO_INDEX": "1"}, {"PIP_FIND_LINKS": str(wheels)}]
    env = {"node_ranks": 0, "requirements": list(requirements), "env_vars": variables}
    return {"num_nodes": 1, "node_groups": [{"label": "sim", "node_ranks": 0, "env_configs": [env]}]}


def test_workers_run_in_an_environment_that_is_built_once(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("RLINF_ACTORS_CACHE_DIR", str(tmp_path / "cache"))
    wheel(tmp_path / "wheels", "tinypkg", "3.1")
    place = NodePlacementStrategy([0, 0], node_group_label="sim")
    for _ in range(2):
        with Cluster(cluster_cfg=config(tmp_path / "wheels", "tinypkg>=3")) as cluster:
            groups = [Importer.create_group().launch(cluster, place, name=f"g{n}") for n in range(2)]
            told = [told for group in groups for told in group.version().wait(60)]
            assert {version for version, _ in told} == {"3.1"}
            assert {os.path.dirname(prefix) for _, prefix in told} == {str(tmp_path / "cache" / "environments")}
            plain = Importer.create_group().launch(cluster, NodePlacementStrategy([0]), name="plain")
            with pytest.raises(ModuleNotFoundError, match="tinypkg"):
                plain.version().wait(60)
    out = capfd.readouterr()
    assert (out.out + out.err).count("$ ") == 2  # venv and install, once


def test_failed_build_shows_its_output(tmp_path, monkeypatch):
    monkeypatch.setenv("RLINF_ACTORS_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "wheels").mkdir()
    with Cluster(cluster_cfg=config(tmp_path / "wheels", "nothing-of-that-name")) as cluster:
        with pytest.raises(WorkerStartError, match="nothing-of-that-name cannot be built on node 0") as raised:
            Importer.create_group().launch(cluster, NodePlacementStrategy([0], node_group_label="sim"))
        assert re.search("No matching distribution found|requirements are unsatisfiable", str(raised.value))  # pip, uv


HANGS = """
    import socket
    from rlinf_actors import Cluster, NodePlacementStrategy, Worker

    class Nothing(Worker):
        pass

    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that never answers
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        env = {"node_ranks": 0, "requirements": ["tinypkg"], "env_vars": [{"PIP_INDEX_URL": index}]}
        groups = [{"label": "sim", "node_ranks": 0, "env_configs": [env]}]
        with Cluster(cluster_cfg={"num_nodes": 1, "node_groups": groups}) as cluster:
            Nothing.create_group().launch(cluster, NodePlacementStrategy([0], node_group_label="sim"), name="g")
"""


def test_interrupted_launch_ends_the_build(tmp_path):
    """Ctrl-C: the driver ends at once, with pip and all that it left unfinished."""
    env = {**os.environ, "RLINF_ACTORS_CACHE_DIR": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(HANGS))
    driver = subprocess.Popen(
        [sys.executable, script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert driver.stdout is not None
    with driver.stdout:
        said = next(line for line in driver.stdout if "install" in line)
        assert "code@" in said  # the build's output comes while it runs
        driver.send_signal(signal.SIGINT)
        rest = driver.stdout.read()
    assert driver.wait(30) in (1, -signal.SIGINT, 130)
    assert "KeyboardInterrupt" in rest
    made = tmp_path / "cache" / "environments"
    assert not list(made.glob("*/rlinf-actors.json"))
