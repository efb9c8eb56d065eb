"""`rlinf-actors dropin --check` lists the names that a program uses and that are not served."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from rlinf_actors.cli.app import run
from rlinf_actors.dropin.check import check


def found(tmp_path: Path, source: str) -> list[tuple[int, str]]:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(source))
    return [(finding.line, finding.name) for finding in check(file)]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from rlinf.scheduler import Newer", "rlinf.scheduler.Newer"),
        ("import rlinf.scheduler.newer", "rlinf.scheduler.newer"),
        ("import rlinf.scheduler.worker.worker as w; w.Newer()", "rlinf.scheduler.worker.worker.Newer"),
        ("from rlinf import scheduler; scheduler.Newer", "rlinf.scheduler.Newer"),
        ("from rlinf.scheduler import Worker; Worker._is_ray_actor", "Worker._is_ray_actor"),
        ("from rlinf.scheduler import Cluster; Cluster()._node_manager", "Cluster._node_manager"),
        ("from rlinf.scheduler import Cluster; c = Cluster(num_nodes=1); c._node_manager", "Cluster._node_manager"),
        ("from rlinf.scheduler import Cluster\ndef f(c: Cluster): return c._node_manager", "Cluster._node_manager"),
        ("from rlinf.scheduler import Channel; c = Channel.create('c'); c._channel_name", "Channel._channel_name"),
        ("group = A.create_group().launch(c); group._data_io_ranks", "WorkerGroup._data_io_ranks"),
        (
            "from unittest import mock; mock.patch('rlinf.scheduler.worker.worker.newer')",
            "rlinf.scheduler.worker.worker.newer",
        ),
        ("import ray; ray.get", "ray.get"),
        ("from ray.util import placement_group", "ray.util.placement_group"),
        ("import ray.tune", "ray.tune"),
    ],
)
def test_a_use_of_a_missing_name_is_found(tmp_path, source, name):
    assert name in [one for _, one in found(tmp_path, source)]


@pytest.mark.parametrize(
    "source",
    [
        "from rlinf.scheduler import Worker, Cluster as C\nC(num_nodes=1).num_nodes\nWorker.timer",
        "import rlinf.scheduler\nrlinf.scheduler.worker.worker.Worker",
        "import ray, ray.util\nray.is_initialized(); ray.util.get_node_ip_address()",
        "import ray.util.queue\nray.util.queue.Queue(3).get()",
        "from ray.util.queue import Queue, Empty",
        "import rlinf.utils.logging",
        "from rlinf.scheduler.dynamic_scheduler.manager import RolloutManager",
        "array = [1]\narray._node_manager",
        "import xray; xray.get",
    ],
)
def test_names_that_are_served_are_not_listed(tmp_path, source):
    assert found(tmp_path, source) == []


def test_self_of_a_worker_is_checked_across_files(tmp_path):
    (tmp_path / "base.py").write_text("from rlinf.scheduler import Worker\nclass Base(Worker):\n    _lock = None\n")
    method = "    def f(self):\n        return self._lock, self._is_ray_actor, self.x\n"
    (tmp_path / "more.py").write_text(f"from base import Base\nclass More(Base):\n{method}")
    (tmp_path / "other.py").write_text("class Other:\n    def f(self):\n        return self._is_ray_actor\n")
    assert [(Path(one.path).name, one.line, one.name) for one in check(tmp_path)] == [
        ("more.py", 4, "Worker._is_ray_actor")
    ]


def test_relative_imports_within_rlinf_are_resolved(tmp_path):
    package = tmp_path / "rlinf" / "utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "more.py").write_text("from ..scheduler import Newer\nfrom . import other\n")
    (tmp_path / "rlinf" / "scheduler").mkdir()
    (tmp_path / "rlinf" / "scheduler" / "own.py").write_text("import ray; ray.get()")  # is never loaded
    assert [one.name for one in check(tmp_path)] == ["rlinf.scheduler.Newer"]


def test_uses_of_one_name_in_a_file_are_one_line(tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text("import ray\nray.get()\nray.get()\n")
    assert run(["dropin", "--check", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{file}:2: ray.get: needs Ray itself")
    assert out.endswith("(and 1 more use)\n")
    assert err == "not served: 1 name, in 1 of 1 Python file\n"


def test_a_program_without_findings_gives_exit_code_0(tmp_path):
    (tmp_path / "program.py").write_text("from rlinf.scheduler import Worker\n")
    assert run(["dropin", "--check", str(tmp_path)]) == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert found(tmp_path, "def (") == [(1, "file")]
