"""RLINF_CODE_WORKING_DIR=auto, as RLinf's users set it: workers import the package rlinf that the driver has sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkout import NEEDS_SOURCE, SOURCE

pytestmark = [NEEDS_SOURCE, pytest.mark.live, pytest.mark.timeout(120)]

PROGRAM = """
    import json
    from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

    class Importer(Worker):
        def __init__(self):
            super().__init__()

        def files(self):
            import rlinf.utils.placement
            return [rlinf.utils.placement.__file__, self.worker_info.code_hash, issubclass(Importer, Worker)]

    if __name__ == "__main__":
        cluster = Cluster(num_nodes=1)
        group = Importer.create_group().launch(cluster, NodePlacementStrategy([0]), name="importers")
        print("RESULT " + json.dumps(group.files().wait()[0]))
"""


@pytest.mark.parametrize("value", ["auto", "", "package"])
def test_workers_import_the_sent_package(tmp_path: Path, value: str) -> None:
    assert SOURCE is not None
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    given = {"auto": "auto", "": str(SOURCE), "package": str(SOURCE / "rlinf")}[value]
    cache = tmp_path / "cache"
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "RLINF_CODE_WORKING_DIR": given}
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_actors.dropin", "program.py"],
        cwd=tmp_path, env={**env, "RLINF_ACTORS_CACHE_DIR": str(cache)}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    file, code, served = json.loads(line.removeprefix("RESULT "))
    copy = cache / "code" / "trees" / code
    assert file == str(copy / "rlinf" / "utils" / "placement.py")
    assert served
    assert os.listdir(copy) == ["rlinf"]
