"""The interpreter, template, environment and files of a worker."""

import sys

import pytest

from agentd import launch_plan
from agentd.launch_plan import Rules, file_name, log_paths, plan, template_environment, template_key
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.wire.values import WorkerSpec

RULES = Rules("n0", "/log")


def spec(**fields):
    given = {"id": "i", "group": "g", "namespace": "ns", "rank": 3, "world_size": 4, "node_rank": 0, "env": {}}
    return WorkerSpec(**{**given, **fields})


def test_workers_environment_overrides_the_nodes():
    node = {"HOME": "/home/node", "PATH": "/bin", "A": "node"}
    made = plan(spec(env={"PATH": "/ours:/bin", "A": "ours"}), node, RULES)
    assert made.env == {"HOME": "/home/node", "PATH": "/ours:/bin", "A": "ours", WORKER_MARK: "i"}
    override = plan(spec(env={"PATH": "/ours"}, path_env_merge_mode="override"), node, RULES)
    assert override.env["PATH"] == "/ours"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"path_env_merge_mode": "prepend"}, "must be 'append' or 'override'"),
        ({"env": {"A=B": "1"}}, "'A=B' cannot be the name of an environment variable"),
        ({"env": {"A": "\0"}}, "A holds a NUL byte"),
        ({"env": {f"A{number}": "1" for number in range(4000)}}, "4,001 environment variables"),
        ({"env": {"A": "x" * (1 << 17) + "x"}}, "A has 131,074 characters"),
        ({"log_dir": "/\0"}, r"its log directory '/\x00' cannot be one"),
        ({"log_dir": "mine"}, r"its log directory 'mine' cannot be one"),
        ({"preload": ("os", "a\0")}, r"'a\x00' of its preloaded modules cannot be one"),
        ({"interpreter": "/no/such/python"}, "interpreter /no/such/python does not exist there"),
        ({"interpreter": "/etc/passwd"}, "interpreter /etc/passwd cannot be executed there"),
        ({"interpreter": "no_such_python"}, "python_interpreter_path in the node group's env_configs"),
    ],
)
def test_impossible_start_says_why(fields, text):
    with pytest.raises(WorkerStartError) as caught:
        plan(spec(**fields), {"PATH": "/usr/bin"}, RULES)
    assert text in str(caught.value)
    assert str(caught.value).startswith("g:3 cannot be started on node n0: ")
    assert (caught.value.worker, caught.value.node) == ("g:3", "n0")


def test_interpreters_must_be_below_an_allowed_prefix():
    rules = Rules("n0", "/log", allowed=("/opt", "/usr/"))
    assert plan(spec(), {}, rules).key.interpreter == sys.executable
    assert plan(spec(interpreter=sys.executable), {}, rules).key.interpreter == sys.executable
    assert plan(spec(interpreter="/usr/bin/env"), {}, rules).key.interpreter == "/usr/bin/env"
    assert plan(spec(interpreter="env"), {"PATH": "/usr/bin"}, rules).key.interpreter == "/usr/bin/env"
    for path in ("/bin/sh", "/usr/../bin/sh", "/optional/python", "python-in-cwd"):
        with pytest.raises(WorkerStartError, match="is not below a directory that agentd allows there"):
            plan(spec(interpreter=path), {"PATH": ""}, rules)


def test_templates_differ_by_what_is_read_at_load_time():
    key = template_key("/p", {"A": "1", "HOME": "/"}, [])
    assert key == template_key("/p", {"A": "2"}, ())
    others = [
        {"LD_PRELOAD": "x"},
        {"OMP_NUM_THREADS": "2"},
        {"PYTHONPATH": "/x"},
        {"GLIBC_TUNABLES": "a=b"},
        {"LC_ALL": "C"},
    ]
    assert len({key, *(template_key("/p", env, []) for env in others), template_key("/p", {}, ["torch"])}) == 7
    assert template_key("/p", {}, ["torch", "torch"]) == template_key("/p", {}, ["torch"])


def test_template_environment_omits_variables_of_one_worker():
    key = template_key("/p", {"OMP_NUM_THREADS": "8", "LD_LIBRARY_PATH": "/ours", "RANK": "3"}, [])
    env = template_environment(key, {"HOME": "/h", "LD_LIBRARY_PATH": "/node", "PYTHONPATH": "/node"})
    assert env["LD_LIBRARY_PATH"] == "/ours"
    assert (env["OMP_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"], env["MKL_NUM_THREADS"]) == ("1", "1", "1")
    assert env["THP_MEM_ALLOC_ENABLE"] == "1"
    assert env["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=3145728"
    assert not {"RANK", "PYTHONPATH"} & env.keys()
    assert len(env[WORKER_MARK]) == launch_plan.SLOT


@pytest.mark.parametrize(
    ("theirs", "merged"),
    [
        (
            "glibc.malloc.check=3:glibc.cpu.x86_non_temporal_threshold=9",
            "glibc.malloc.check=3:glibc.cpu.x86_non_temporal_threshold=9:glibc.malloc.hugetlb=1",
        ),
        ("glibc.malloc.hugetlb=2", "glibc.malloc.hugetlb=2:glibc.cpu.x86_non_temporal_threshold=3145728"),
    ],
)
def test_glibc_tunables_of_the_user_are_kept(theirs, merged):
    key = template_key("/p", {"GLIBC_TUNABLES": theirs}, [])
    assert template_environment(key, {})["GLIBC_TUNABLES"] == merged


def test_log_paths_stay_below_the_log_directory():
    assert log_paths(spec(), "/log") == ("/log/ns/g-3.out", "/log/ns/g-3.err")
    assert log_paths(spec(log_dir="/mine"), "/log")[0] == "/mine/ns/g-3.out"
    out, _ = log_paths(spec(namespace="../..", group="a/b"), "/log")
    assert out.startswith("/log/")
    assert ".." not in out.split("/")
    assert len({file_name(name) for name in ("a/b", "a_b", "a b", "..", "", ".", "é")}) == 7
    assert all("/" not in file_name(name) and file_name(name)[0] != "." for name in ("a/b", "..", ".x"))
