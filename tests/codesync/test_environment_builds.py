"""Environments that a node builds: by pip and by uv, without an index, once for each hash, and cleaned up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import pace
import pytest
from msgspec.structs import replace
from wheel_kit import uv, wheel

from rlinf_actors.codesync import locks
from rlinf_actors.codesync.environments import (
    COMPLETE,
    Base,
    Build,
    Environment,
    EnvironmentBuildError,
    EnvironmentStore,
    Recipe,
)
from rlinf_actors.codesync.places import Places
from rlinf_actors.codesync.requirements import Requirements
from rlinf_actors.settings import CodeSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uv_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return uv(tmp_path_factory.mktemp("uv"))


@pytest.fixture(params=["pip", "uv"])
def tool(request: pytest.FixtureRequest) -> str:
    """Path of uv, or "" for pip."""
    if request.param == "pip":
        return ""
    found = request.getfixturevalue("uv_path")
    if not found:
        pytest.skip("uv is not installed, and cannot be")
    return str(found)


def store(place: Path, kept: int = 8) -> EnvironmentStore:
    return EnvironmentStore(Places(str(place), CodeSettings(str(place), environments_kept=kept)))


def recipe(wheels: Path, tool: str, *lines: str, **variables: str) -> Recipe:
    """The index of the machine is a directory, for both tools by pip's own variables."""
    home = wheels.parent / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([os.path.dirname(tool), "/usr/bin", "/bin"] if tool else ["/usr/bin", "/bin"])
    environ = {"PATH": path, "HOME": str(home), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), **variables}
    made = Recipe.of(Requirements(lines), environ, Base.own())
    return replace(made, uv=tool)  # where the machine has uv, pip is tested too


def build_of(to: EnvironmentStore, wanted: Recipe) -> tuple[Environment, list[str]]:
    said: list[str] = []
    return to.acquire(wanted, Build(said.append)), said


def run(interpreter: str, code: str, environ: Mapping[str, str] | None = None) -> str:
    command = [interpreter, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_environment_has_its_packages_before_those_of_its_interpreter(tmp_path, tool):
    for name, version in (("tinypkg", "1.5"), ("msgspec", "99.0")):
        wheel(tmp_path / "wheels", name, version)
    made, said = build_of(store(tmp_path), recipe(tmp_path / "wheels", tool, "tinypkg>=1", "msgspec==99.0"))
    assert made.built
    assert any(line.startswith(f"$ {tool}" if tool else "$ ") for line in said)
    out = run(
        made.interpreter, "import sys, tinypkg, msgspec, zmq; print(tinypkg.VERSION, msgspec.VERSION, sys.prefix)"
    )
    assert out == f"1.5 99.0 {os.path.dirname(os.path.dirname(made.interpreter))}"
    made.release()


def test_environment_is_built_once(tmp_path):
    wheel(tmp_path / "wheels", "tinypkg")
    to, wanted = store(tmp_path), recipe(tmp_path / "wheels", "", "tinypkg")
    made: list[Environment] = []
    threads = [threading.Thread(target=lambda: made.append(build_of(to, wanted)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(pace.PATIENCE_S)
    assert [one.built for one in made].count(True) == 1
    assert len({one.interpreter for one in made}) == 1
    assert not build_of(store(tmp_path), wanted)[0].built  # nor by a later process


def test_a_builder_gets_the_environment_that_another_built_and_still_uses(tmp_path, monkeypatch):
    def build(_store: EnvironmentStore, entry: str, *_more: object) -> None:
        os.mkdir(entry)
        Path(entry, COMPLETE).touch()

    def release_and_let_another_build(lock: locks.Lock) -> None:
        release(lock)
        monkeypatch.setattr(locks.Lock, "release", release)
        used.append(build_of(to, wanted)[0])

    to, wanted, release, used = store(tmp_path), recipe(tmp_path, "", "tinypkg"), locks.Lock.release, []
    monkeypatch.setattr(EnvironmentStore, "_build", build)
    monkeypatch.setattr(locks.Lock, "release", release_and_let_another_build)
    found: list[Environment] = []
    thread = threading.Thread(target=lambda: found.append(build_of(to, wanted)[0]), daemon=True)
    thread.start()
    thread.join(pace.PATIENCE_S)
    assert [one.built for one in used + found] == [True, False]


def test_failed_build_tells_its_output_and_leaves_nothing(tmp_path, tool):
    (tmp_path / "wheels").mkdir()
    to = store(tmp_path)
    with pytest.raises(EnvironmentBuildError, match="nothing-of-that-name"):
        build_of(to, recipe(tmp_path / "wheels", tool, "nothing-of-that-name==1"))
    assert os.listdir(to.directory) == []


def test_another_index_interpreter_or_list_is_another_environment(tmp_path):
    wheels = wheel(tmp_path / "wheels", "tinypkg").parent
    first = recipe(wheels, "", "tinypkg")
    names = {
        first.name, recipe(wheels, "", "tinypkg", "other").name, recipe(wheels, "", "tinypkg", PIP_INDEX_URL="x").name,
        replace(first, base=replace(first.base, interpreter="/usr/bin/python3")).name, replace(first, uv="/uv").name,
    }  # fmt: skip
    assert len(names) == 5
    assert recipe(wheels, "", "tinypkg", UNRELATED="1").name == first.name
    (tmp_path / "home" / ".config" / "pip").mkdir(parents=True)
    (tmp_path / "home" / ".config" / "pip" / "pip.conf").write_text("[global]\nindex-url = http://localhost\n")
    assert recipe(wheels, "", "tinypkg").name != first.name


def test_pip_conf_of_the_machine_is_respected(tmp_path, tool):
    wheels = wheel(tmp_path / "elsewhere", "tinypkg", "2.0").parent
    home = tmp_path / "home"
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n")
    wanted = recipe(tmp_path / "x", tool, "tinypkg", PIP_FIND_LINKS="", PIP_NO_INDEX="")
    made, _ = build_of(store(tmp_path), wanted)
    assert run(made.interpreter, "import tinypkg; print(tinypkg.VERSION)") == "2.0"


BUILDER = """
    import json, os, signal, sys
    sys.path[:0] = json.loads(sys.argv[1])
    from pathlib import Path
    from rlinf_actors.codesync.environments import Build
    from test_environment_builds import recipe, store

    def say(line):
        if line.startswith("$") and "pip install" in line:
            os.kill(os.getpid(), signal.SIGKILL)  # the environment is there, and its packages are not

    store(Path(sys.argv[2])).acquire(recipe(Path(sys.argv[3]), "", "tinypkg"), Build(say))
"""


def test_what_a_killed_builder_leaves_is_built_again(tmp_path):
    wheels = wheel(tmp_path / "wheels", "tinypkg").parent
    to, wanted = store(tmp_path), recipe(wheels, "", "tinypkg")
    command = [sys.executable, "-c", textwrap.dedent(BUILDER), json.dumps(sys.path), str(tmp_path), str(wheels)]
    assert subprocess.run(command, check=False, timeout=pace.PATIENCE_S).returncode == -signal.SIGKILL
    entry = os.path.join(to.directory, wanted.name)
    assert os.path.exists(os.path.join(entry, "pyvenv.cfg"))
    assert not os.path.exists(os.path.join(entry, COMPLETE))
    made, _ = build_of(to, wanted)
    assert made.built
    assert run(made.interpreter, "import tinypkg; print(tinypkg.VERSION)") == "1.0"


def test_cancelled_build_ends_pip_and_leaves_nothing(tmp_path):
    wheels = wheel(tmp_path / "wheels", "tinypkg").parent
    to = store(tmp_path)
    said: list[str] = []
    build = Build(lambda line: (said.append(line), build.cancel("the launch was cancelled")))
    with pytest.raises(EnvironmentBuildError, match="the launch was cancelled"):
        to.acquire(recipe(wheels, "", "tinypkg"), build)
    assert len(said) == 1
    assert os.listdir(to.directory) == []


class TestTrim:
    def made(self, to: EnvironmentStore, *names: str) -> None:
        """Environments as a build leaves them, used in this order."""
        for at, name in enumerate(names):
            os.makedirs(os.path.join(to.directory, name))
            Path(to.directory, name, COMPLETE).touch()
            lock = Path(to.directory, name + locks.SUFFIX)
            lock.touch()
            os.utime(lock, (at + 1, at + 1))

    def left(self, to: EnvironmentStore) -> set[str]:
        return {name for name in os.listdir(to.directory) if not name.endswith(locks.SUFFIX)}

    def test_longest_unused_environments_are_removed(self, tmp_path):
        to = store(tmp_path, kept=2)
        self.made(to, "a", "b", "c", "d")
        assert to.trim() == ["a", "b"]
        assert self.left(to) == {"c", "d"}
        assert sorted(os.listdir(to.directory)) == ["c", "c.lock", "d", "d.lock"]

    def test_environment_in_use_stays(self, tmp_path):
        to = store(tmp_path, kept=1)
        self.made(to, "a", "b", "c")
        used = locks.hold(os.path.join(to.directory, "a"))
        assert used is not None
        assert to.trim() == ["b", "c"]
        assert self.left(to) == {"a"}
        used.release()
        assert to.trim() == []

    def test_incomplete_environment_is_removed(self, tmp_path):
        to = store(tmp_path)
        self.made(to, "a", "b")
        Path(to.directory, "a", COMPLETE).unlink()
        assert to.trim() == ["a"]


@pytest.mark.nightly("ensurepip unpacks all of pip, for bases that few have")
def test_base_without_pip_gets_one_from_ensurepip(tmp_path):
    if shutil.which("uv") is None and not Base.own().pip:
        pytest.skip("this interpreter has no pip")
    wanted = recipe(wheel(tmp_path / "wheels", "tinypkg").parent, "", "tinypkg")
    wanted = replace(wanted, base=replace(wanted.base, pip=False))
    made, _ = build_of(store(tmp_path), wanted)
    assert run(made.interpreter, "import tinypkg; print(tinypkg.VERSION)") == "1.0"
