"""Which directory is sent, by configuration and RLINF_CODE_WORKING_DIR, and where its copy takes its place."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from code_kit import snapshot, write

from rlinf_actors.codesync.source import CodeSource, find_source
from rlinf_actors.errors import ConfigError
from rlinf_actors.group.provision import placed
from rlinf_actors.settings import CODE_WORKING_DIR
from rlinf_actors.wire.values import WorkerSpec


def nothing(_name: str) -> None:
    return None


@pytest.mark.parametrize("variable", [None, "", "0", "off", "False", "no"])
def test_nothing_is_sent_unless_asked(variable):
    assert find_source(None, variable) is None


def test_configuration_names_a_directory_and_excludes(tmp_path):
    found = find_source(str(tmp_path), None, ["data/"], 7)
    assert found == CodeSource(os.path.realpath(tmp_path), (), ("data/",), 7)


def test_variable_has_precedence(tmp_path):
    other = write(tmp_path / "other", {"a.py": ""})
    found = find_source(str(tmp_path), str(other), ["x"])
    assert found is not None
    assert (found.root, found.excludes, found.asked_by) == (os.path.realpath(other), ("x",), CODE_WORKING_DIR)
    assert find_source(str(tmp_path), "off") is None


def test_variable_of_an_rlinf_checkout_sends_the_package_alone(tmp_path):
    write(tmp_path, {"rlinf/__init__.py": "", "pyproject.toml": "", "examples/a.py": ""})
    for given in (tmp_path, tmp_path / "rlinf"):
        found = find_source(None, str(given))
        assert found is not None
        assert (found.root, found.only) == (os.path.realpath(tmp_path), ("rlinf",))


def test_auto_finds_the_checkout_of_rlinf(tmp_path):
    write(tmp_path, {"rlinf/__init__.py": "", "pyproject.toml": ""})
    spec = ModuleSpec("rlinf", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "rlinf")]
    found = find_source(None, "auto", find=lambda name: spec)
    assert found is not None
    assert (found.root, found.only) == (os.path.realpath(tmp_path), ("rlinf",))


def test_auto_finds_the_project_around_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path, {"pyproject.toml": "", "src/deep/a.py": ""})
    monkeypatch.chdir(tmp_path / "src" / "deep")
    found = find_source(None, "auto", find=nothing)
    assert found is not None
    assert (found.root, found.only) == (os.path.realpath(tmp_path), ())


@pytest.mark.parametrize("given", ["relative", "/does/not/exist", "/", "~"])
def test_wrong_directory_is_refused_by_the_name_of_the_variable(given):
    with pytest.raises(ConfigError) as raised:
        find_source(None, given)
    assert raised.value.path == CODE_WORKING_DIR


def test_auto_without_a_project_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if any((parent / "pyproject.toml").exists() for parent in tmp_path.parents):
        pytest.skip("the temporary directory is in a project")
    with pytest.raises(ConfigError, match="name the project's directory"):
        find_source(None, "auto", find=nothing)


class TestPlaced:
    """Directories of the driver in a WorkerSpec are replaced by their copies."""

    def spec(self, root: Path, **more: object) -> WorkerSpec:
        spec = WorkerSpec("w", "g", "n", 0, 1, 0, {}, sys_path=(f"{root}/examples", "/opt/other", str(root)))
        return spec if not more else WorkerSpec(**{**{f: getattr(spec, f) for f in spec.__struct_fields__}, **more})

    def test_import_path_working_directory_and_pythonpath(self, tmp_path):
        root = Path(os.path.realpath(write(tmp_path, {"examples/a.py": "", "pkg/b.py": ""})))
        env = {"PYTHONPATH": f"{root}/pkg:/opt/more:{root}/", "OTHER": "1"}
        spec = placed(self.spec(root, cwd=f"{root}/examples", env=env), snapshot(root), "/copy")
        assert spec.sys_path == ("/copy/examples", "/copy", "/opt/other")
        assert spec.code_paths == ("/copy", "/copy/examples", "/copy")
        assert spec.cwd == "/copy/examples"
        assert spec.env == {"PYTHONPATH": "/copy/pkg:/opt/more:/copy", "OTHER": "1"}
        assert spec.code == snapshot(root).tree.root.hex()

    def test_root_of_the_copy_is_always_on_the_path(self, tmp_path):
        root = Path(os.path.realpath(write(tmp_path, {"src/a.py": ""})))
        spec = placed(self.spec(root, sys_path=(f"{root}/src", "/opt/x")), snapshot(root), "/copy")
        assert spec.code_paths == ("/copy", "/copy", "/copy/src")
        assert spec.sys_path == ("/copy", "/copy/src", "/opt/x")

    def test_directories_that_were_not_sent_stay(self, tmp_path):
        root = Path(os.path.realpath(write(tmp_path, {"rlinf/__init__.py": "", "examples/a.py": ""})))
        code = snapshot(root, only=("rlinf",))
        spec = placed(self.spec(root, cwd=f"{root}/examples"), code, "/copy")
        assert spec.sys_path == ("/copy", f"{root}/examples", "/opt/other")
        assert spec.cwd == f"{root}/examples"
        assert placed(self.spec(root, cwd=str(root)), code, "/copy").cwd == str(root)

    def test_directory_with_a_similar_name_is_another(self, tmp_path):
        root = Path(os.path.realpath(write(tmp_path / "proj", {"a.py": ""})))
        spec = placed(self.spec(root, sys_path=(f"{root}2",), cwd=f"{root}2"), snapshot(root), "/copy")
        assert spec.sys_path == ("/copy", f"{root}2")
        assert spec.cwd == f"{root}2"
