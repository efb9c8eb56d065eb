"""What a running agentd, with the head inside, has loaded after a job, and whether it ever unpickled anything.

import-linter sees what modules say that they import; this sees what was imported, by whomever and however late.
"""

from __future__ import annotations

import json
import os

import pytest
from canary_workers import Keeper

from rlinf_actors import Channel, NodePlacementStrategy
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

WATCHER = """
import sys
if "--run-dir" in sys.orig_argv:  # an agentd
    import atexit, json, os, pickle
    used = []
    def note(what):
        def noted(*arguments, **keywords):
            used.append(what)
            raise AssertionError(f"a daemon called pickle.{what}")
        return noted
    before = set(sys.modules)
    for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"):
        setattr(pickle, name, note(name))
    sys.addaudithook(lambda event, arguments: used.append(event) if event == "pickle.find_class" else None)
    def tell():
        where = sys.orig_argv[sys.orig_argv.index("--run-dir") + 1]
        with open(os.path.join(os.environ["WATCHED"], os.path.basename(where)), "w") as file:
            json.dump({"modules": sorted(sys.modules), "used": used}, file)
    atexit.register(tell)
"""
"""For `sitecustomize`, which every interpreter loads when it starts."""

NEVER = (
    "cloudpickle", "dill", "multiprocessing", "numpy", "torch", "concurrent.futures.process",
    "rlinf_actors.wire.payload", "rlinf_actors.wire.failure", "rlinf_actors.wire.payload",
    "rlinf_actors.worker.worker",
    "rlinf_actors.group", "rlinf_actors.runtime", "rlinf_actors.channel", "rlinf_actors.messaging",
)  # fmt: skip


def test_daemons_have_not_loaded_pickle_after_a_job(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCHER)
    (tmp_path / "said").mkdir()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with LocalCluster(num_nodes=2, env={"PYTHONPATH": path, "WATCHED": str(tmp_path / "said")}) as local:
        cluster = local.cluster()
        group = Keeper.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="keepers")
        Channel.create("items")
        group.pass_on(str(tmp_path / "made"), "items").wait()
        cluster.shutdown()
    told = [json.loads(file.read_text()) for file in (tmp_path / "said").iterdir()]
    assert len(told) == 2, "both agentds"
    for one in told:
        assert "zmq" in one["modules"]
        assert one["used"] == []
        assert not [name for name in one["modules"] if name in NEVER or name.startswith(tuple(f"{n}." for n in NEVER))]
    head = [one for one in told if "rlinf_actors.head.server" in one["modules"]]
    assert len(head) == 1
