"""Worker.log_info and its siblings, in workers that configure Python's logging, and in JSON."""

from __future__ import annotations

import json
import os
import re
import time

import logging_workers as workers
import pytest

from rlinf_actors import Cluster
from rlinf_actors.worker.log_format import KEYS

pytestmark = pytest.mark.live


def output(tmp_path, *classes, method="say", env=None):
    """Return the lines that a worker of each class writes to stdout and stderr."""
    with Cluster(num_nodes=1, distributed_log_dir=tmp_path) as cluster:
        for cls in classes:
            group = cls.create_group().launch(cluster, name=cls.__name__, env_vars=env)
            getattr(group, method)().wait()
    return {cls: (tmp_path / cls.__name__ / "rank_0.log").read_text().splitlines() for cls in classes}


def test_messages_go_to_users_handlers_and_to_no_other(rlinf_leak_check, tmp_path):
    names = (
        workers.Plain, workers.Basic, workers.OnRoot, workers.OnOwn, workers.OnOwnAlone, workers.ByName,
        workers.ForRoot,
    )  # fmt: skip
    said = output(tmp_path, *names)
    first, second = said.pop(workers.Plain)
    assert re.fullmatch(r"\[INFO [\d-]+ [\d:,]+ logging_workers\.py:\d+\] at info", first)
    assert second == "of my own", "what Python does for a logger without a handler"
    own = "rlinf_actors.worker.Basic:0"
    assert said == {
        workers.Basic: [f"basic {own} at info", "basic mine of my own"],
        workers.OnRoot: ["root at info", "root of my own"],
        workers.OnOwn: ["own at debug", "own at info", "of my own"],
        workers.OnOwnAlone: ["own at debug", "own at info", "root of my own"],
        workers.ByName: ["named at info", "of my own"],
        workers.ForRoot: ["at info", "of my own"],
    }


def test_lines_in_json_say_who_logged_what(rlinf_leak_check, tmp_path):
    (line,) = output(tmp_path, workers.Plain, method="fail", env={"RLINF_ACTORS_LOG_FORMAT": "json"})[workers.Plain]
    found = json.loads(line)
    assert tuple(found) == KEYS
    assert abs(found.pop("time") - time.time()) < 3600
    assert found.pop("exception").endswith("ValueError: wrong é\n\x1b[2J"), "with line feeds, in one line"
    assert found.pop("job")
    assert found == {
        "level": "ERROR", "group": "Plain", "rank": 0, "node": os.uname().nodename,
        "logger": "rlinf_actors.worker.Plain:0", "message": "it failed",
    }  # fmt: skip


def test_users_handlers_keep_their_format_where_ours_is_json(rlinf_leak_check, tmp_path):
    said = output(tmp_path, workers.OnRoot, env={"RLINF_ACTORS_LOG_FORMAT": "json"})
    assert said[workers.OnRoot] == ["root at info", "root of my own"]
