"""Which profilers a node allows, where their files go, and what the worker is started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from agentd.launch_plan import Rules, plan
from agentd.node_report import profiler_backends
from rlinf_actors.config.profiling_config import RocprofSysConfig
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.model.profiler import Profiler
from rlinf_actors.wire.values import Claim, WorkerSpec

NSYS = Profiler(["nsys", "profile", "-o", "{output}"])
SPEC = WorkerSpec("w-0", "my group", "job", 3, 4, 0, {}, profiler=NSYS)


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rules:
    for name in ("nsys", "rocprof-sys-python"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return Rules("here", "/logs", profilers=("nsys", "rocprof-sys-python"))


def test_program_is_found_and_the_profile_is_beside_the_logs(rules: Rules, tmp_path: Path) -> None:
    found = plan(SPEC, {}, rules)
    directory = str(Path(found.out_path).parent)
    assert found.wrapper[:3] == (str(tmp_path / "nsys"), "profile", "-o")
    assert found.wrapper[3].startswith(f"{directory}/my_group-")
    assert found.wrapper[3].endswith("-3.profile")
    assert found.profile_dir == directory


def test_restarted_worker_does_not_overwrite_the_profile_of_the_first(rules: Rules) -> None:
    paths = [plan(replace(SPEC, incarnation=number), {}, rules).wrapper[3] for number in range(3)]
    assert len(set(paths)) == 3


def test_rocprof_is_told_by_variables_where_its_files_go(rules: Rules) -> None:
    program = RocprofSysConfig(worker_groups="all", output_dir="/profiles").profiler()
    found = plan(replace(SPEC, profiler=program, group="g"), {}, rules)
    assert found.env["ROCPROFSYS_OUTPUT_PATH"] == "/profiles"
    assert found.env["ROCPROFSYS_OUTPUT_PREFIX"] == "g-3.profile"


def test_allowed_path_serves_the_programs_name(rules: Rules, tmp_path: Path) -> None:
    found = plan(SPEC, {}, replace_rules(rules, (str(tmp_path / "nsys"),)))
    assert found.wrapper[0] == str(tmp_path / "nsys")


@pytest.mark.parametrize("program", ["sh", "/bin/sh", "nsys-launcher", "../nsys"])
def test_other_programs_are_refused_with_file_and_key(rules: Rules, program: str) -> None:
    with pytest.raises(WorkerStartError, match=r"'.*' is not among those that workers\.profilers in agentd\.toml"):
        plan(replace(SPEC, profiler=Profiler([program])), {}, rules)


def test_missing_program_and_robots_are_refused(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerStartError, match="holds robots"):
        plan(replace(SPEC, claims=(Claim("k", "an arm"),)), {}, rules)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(WorkerStartError, match=r"is not in the PATH of agentd there \(/nowhere\): install it"):
        plan(SPEC, {}, rules)
    assert profiler_backends(rules.profilers) == []


@pytest.mark.parametrize(
    "profiler",
    [
        Profiler([]),
        Profiler(["nsys", "a\0b"]),
        Profiler(["nsys"], {"A\0": "x"}),
        Profiler(["nsys"], {"A=": "x"}),
        Profiler(["nsys"], directory="/tmp/a\0b"),
    ],
)
def test_profiler_that_no_process_can_be_started_with_is_refused(rules: Rules, profiler: Profiler) -> None:
    with pytest.raises(WorkerStartError, match="my group:3 cannot be started on node here"):
        plan(replace(SPEC, profiler=profiler), {}, rules)


def test_variables_of_a_profiler_do_not_say_whose_process_it_is(rules: Rules) -> None:
    program = Profiler(NSYS.command, {"RLINF_ACTORS_WORKER": "another"})
    assert plan(replace(SPEC, profiler=program), {}, rules).env["RLINF_ACTORS_WORKER"] == SPEC.id


def test_node_reports_the_backends_that_it_has(rules: Rules) -> None:
    assert profiler_backends(rules.profilers) == ["nsight", "rocprof_sys"]
    assert profiler_backends(("nsys",)) == ["nsight"]


def replace_rules(rules: Rules, profilers: tuple[str, ...]) -> Rules:
    return Rules(rules.node, rules.log_dir, profilers=profilers)
