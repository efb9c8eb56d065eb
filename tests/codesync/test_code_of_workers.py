"""What the hash and the directories in a WorkerSpec do on the node: environment, template, import path."""

from __future__ import annotations

import pytest

from agentd.launch_plan import Rules, allowed_interpreters, plan
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.settings import CODE_DIR, CODE_HASH
from rlinf_actors.template.child_setup import import_path
from rlinf_actors.wire.values import WorkerSpec

RULES = Rules("n0", "/log")


def spec(code: str, *paths: str, **env: str) -> WorkerSpec:
    return WorkerSpec("i", "g", "ns", 0, 1, 0, env, code=code, code_paths=list(paths))


@pytest.mark.parametrize("mode", ["append", "override"])
def test_code_comes_before_what_the_node_has(mode):
    node = {"PYTHONPATH": "/stale/checkout:/node/lib"}
    sent = spec("abc", "/copy", "/copy/examples", "/copy")
    made = plan(WorkerSpec(**{**_fields(sent), "path_env_merge_mode": mode}), node, RULES)
    assert made.env["PYTHONPATH"] == "/copy/examples:/copy:/stale/checkout:/node/lib"
    assert (made.env[CODE_HASH], made.env[CODE_DIR]) == ("abc", "/copy")


def _fields(spec: WorkerSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def test_other_code_is_run_by_another_template():
    none = plan(spec(""), {}, RULES)
    first, again = plan(spec("a", "/1", "/1"), {}, RULES), plan(spec("a", "/1", "/1"), {}, RULES)
    other = plan(spec("b", "/2", "/2"), {}, RULES)
    assert first.key == again.key
    assert len({none.key, first.key, other.key}) == 3
    assert CODE_DIR not in none.env


def test_directory_that_cannot_be_in_an_environment_is_refused():
    with pytest.raises(WorkerStartError, match="holds a NUL byte"):
        plan(spec("a", "/1\0", "/1\0"), {}, RULES)


def test_import_path_of_a_worker_begins_with_the_code():
    current = ["/run/pkg", "/copy/examples", "/copy", "/stale", "/usr/lib/python3.11"]
    wanted = ["/copy/examples", "/copy", "/home/me/other", "/stale", "/missing"]
    found = import_path(current, wanted, lambda path: path != "/missing", ["/copy/examples", "/copy"])
    assert found == ["/run/pkg", "/copy/examples", "/copy", "/home/me/other", "/stale", "/usr/lib/python3.11"]


def test_environments_of_the_node_are_allowed_as_interpreters(tmp_path):
    from agentd.config_fields import Config
    from rlinf_actors.wire.values import NodeReport

    report = NodeReport("n", "n", "10.0.0.1", "h", 1, 1, "3.11", "/usr/bin/python3")
    env = {"RLINF_ACTORS_CACHE_DIR": str(tmp_path)}
    assert f"{tmp_path}/environments" in (allowed_interpreters(Config(), report, env) or ())
    assert allowed_interpreters(Config(interpreters=("/opt",)), report, env) == ("/opt", f"{tmp_path}/environments")
