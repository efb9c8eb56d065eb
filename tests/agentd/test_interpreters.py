"""Workers in other interpreters, and interpreters that cannot run any."""

import sys
import venv

import environments
import pytest
from workers_kit import children, order, spec

pytestmark = pytest.mark.live


def empty_environment(path):
    """A virtual environment of this Python with nothing installed."""
    venv.create(path, with_pip=False, symlinks=True)
    return str(path / "bin" / "python")


async def refusal(tmp_path, interpreter, **options):
    async with children(tmp_path, **options) as (kids, reports):
        specs = [spec(rank, interpreter=interpreter) for rank in range(2)]
        kids.start(order(specs))
        exits = [await reports.gone(one) for one in specs]
        assert exits[0] == exits[1] or "g:1" in exits[1].reason
        assert exits[0].kind == "start_failed"
        return exits[0].reason


async def test_interpreter_without_packages_says_how_to_install_them(tmp_path):
    python = empty_environment(tmp_path / "venv")
    reason = await refusal(tmp_path, python)
    assert reason.startswith(f"interpreter {python} on node n0 has no pyzmq, msgspec, cloudpickle: ")
    assert f"run '{python} -m pip install pyzmq msgspec cloudpickle'" in reason


async def test_script_that_is_no_python_fails_with_its_output(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho licence expired >&2\nexit 3\n")
    script.chmod(0o755)
    reason = await refusal(tmp_path, str(script))
    assert f"interpreter {script} on node n0 ended before it was ready: exit code 3" in reason
    assert "licence expired" in reason


async def test_interpreter_that_cannot_be_executed_fails_with_the_reason(tmp_path):
    script = tmp_path / "python"
    script.write_bytes(b"\x7fELF nonsense")
    script.chmod(0o755)
    assert f"{script}: Exec format error" in await refusal(tmp_path, str(script))


async def test_missing_and_forbidden_interpreters_are_refused(tmp_path):
    assert "does not exist there" in await refusal(tmp_path, "/no/such/python")
    assert "not below a directory that agentd allows" in await refusal(
        tmp_path, "/bin/sh", rules={"allowed": ("/opt",)}
    )


async def test_missing_entry_point_fails_the_start(tmp_path):
    reason = await refusal(tmp_path, None, entry="no_such_module:run")
    assert "has no no_such_module" in reason
    assert "AttributeError" in await refusal(tmp_path, None, entry="standin:no_such_function")


async def test_failed_interpreter_is_tried_again(tmp_path):
    gate = tmp_path / "gate"
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n[ -e {gate} ] || exit 1\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    async with children(tmp_path) as (kids, reports):
        one, two = spec(interpreter=str(script)), spec(1, interpreter=str(script))
        kids.start(order([one]))
        await reports.gone(one)
        gate.touch()
        kids.start(order([two]))
        await reports.up(two)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    others = [environments.interpreter(minor) for minor in (12, 10, 13, 11) if minor != sys.version_info[1]]
    python = next((path for path in others if path is not None), None)
    if python is None:
        pytest.skip("needs a second Python, 3.10 or newer")
    folder = tmp_path_factory.mktemp("others") / "other"
    return environments.installed(folder, python, *environments.RUNTIME, *environments.RUNTIME_310)


@pytest.mark.timeout(600)  # pip downloads in it
@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_worker_runs_in_another_python_version(tmp_path, other, method):
    async with children(tmp_path) as (kids, reports):
        ours = spec(0, do="print('version', sys.version_info[1], sys.executable)")
        theirs = spec(
            1, do="print('version', sys.version_info[1], sys.executable)", interpreter=other, start_method=method
        )
        kids.start(order([ours, theirs]))
        await reports.up(ours, theirs)
        await reports.until(lambda: len(reports.lines) == 2)
        said = {name: text.split() for name, _, text in reports.lines}
    assert said["g:0"][1] == str(sys.version_info[1])
    assert said["g:1"][1] != said["g:0"][1]
    assert said["g:1"][2] == other
