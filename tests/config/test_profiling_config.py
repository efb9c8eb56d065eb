"""The ``profiling`` section: its keys, the command before the interpreter, and the groups and steps that it names."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.config.profiling_config import NsightConfig, ProfileConfig, RocprofSysConfig, TorchProfileConfig
from rlinf_actors.errors import ConfigError


def section(**keys: Any) -> ProfileConfig:
    found = ClusterConfig.from_any({"num_nodes": 1, "profiling": keys}).profiling
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("backend", "kind"), [("nsight", NsightConfig), ("rocprof_sys", RocprofSysConfig), ("torch", TorchProfileConfig)]
)
def test_backend_chooses_the_class_of_the_section(backend: str, kind: type) -> None:
    assert type(section(backend=backend)) is kind


@pytest.mark.parametrize(
    ("keys", "path", "text"),
    [
        ({}, "cluster.profiling.backend", "backend must be specified"),
        ({"backend": "nsigth"}, "cluster.profiling.backend", "Unknown profiling backend 'nsigth'; did you mean"),
        ({"backend": "nsight", "args": {}}, "cluster.profiling.args", ""),
        ({"backend": "nsight", "options": ["t"]}, "cluster.profiling.options", ""),
        ({"backend": "nsight", "steps": [-1]}, "cluster.profiling.steps", "non-negative"),
        ({"backend": "nsight", "flags": ["a"], "options": {"a": 1}}, "cluster.profiling", "the same names: a"),
        (
            {"backend": "nsight", "options": {"stop-on-range-end": True, "capture-range-end": "stop"}},
            "cluster.profiling.options",
            "must not specify both 'stop-on-range-end' and 'capture-range-end'",
        ),
        ({"backend": "nsight", "options": {"o": "a", "output": "b"}}, "cluster.profiling.options", "both 'o' and"),
        ({"backend": "rocprof_sys", "env": ["X"]}, "cluster.profiling.env", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fault_names_its_key(keys: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        section(**keys)
    assert raised.value.path == path
    assert text in str(raised.value)


def test_groups_are_matched_in_any_case_and_all_matches_every_group() -> None:
    some = section(backend="nsight", worker_groups=["ActorGroup"])
    assert some.profiles_worker_group("actorgroup")
    assert not some.profiles_worker_group("Actor")
    assert section(backend="nsight", worker_groups="All").profiles_worker_group("anything")
    assert not section(backend="nsight").profiles_worker_group("ActorGroup")
    assert not section(backend="nsight", worker_groups="all", enabled=False).profiles_worker_group("ActorGroup")


def test_ranks_limit_which_workers_are_profiled() -> None:
    some = section(backend="nsight", worker_groups=["a"], ranks=[0, 2])
    assert [rank for rank in range(4) if some.profiles_worker("a", rank)] == [0, 2]
    assert not some.profiles_worker("b", 0)


def test_steps_limit_what_is_profiled() -> None:
    some, every = section(backend="torch", steps=[3, 5]), section(backend="torch")
    assert [step for step in range(7) if some.should_profile_step(step)] == [3, 5]
    assert every.should_profile_step(6)
    assert not section(backend="torch", steps=[3], enabled=False).should_profile_step(3)


def test_nsight_command_has_flags_options_and_the_output() -> None:
    one = section(backend="nsight", options={"t": "cuda,nvtx", "stop-on-range-end": True}, flags="python-backtrace")
    assert one.command() == [
        "nsys", "profile", "--python-backtrace", "-t", "cuda,nvtx", "--capture-range-end=stop", "-o", "{output}",
    ]  # fmt: skip
    assert section(backend="nsight", options={"output": "/x/y"}).command() == ["nsys", "profile", "--output=/x/y"]


def test_nsight_records_only_the_steps_unless_options_say_otherwise() -> None:
    gated = section(backend="nsight", steps=[3], options={"capture-range": "nvtx"}).command()
    assert "--capture-range=nvtx" in gated
    assert "--capture-range-end=stop" in gated
    assert not any("capture-range" in word for word in section(backend="nsight").command())


def test_rocprof_is_told_by_variables_where_its_files_go() -> None:
    one = section(
        backend="rocprof_sys", args={"T": "hip", "output-format": "json"}, env={"ROCPROFSYS_TIME_OUTPUT": True}
    )
    assert one.command() == ["rocprof-sys-python", "-T", "hip", "--output-format=json", "--"]
    assert one.environment() == {
        "ROCPROFSYS_TIME_OUTPUT": "true",
        "ROCPROFSYS_OUTPUT_PATH": "{output_dir}",
        "ROCPROFSYS_OUTPUT_PREFIX": "{output_name}",
    }


def test_torch_needs_no_command() -> None:
    assert section(backend="torch", worker_groups="all").command() == []
