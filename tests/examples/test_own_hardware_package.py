"""The package with a hardware type of its own: by RLINF_EXT_MODULE, and installed by pip."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_actors.compat import tomllib

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "own_hardware"

pytestmark = pytest.mark.live


def run(program: Path, *arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it from elsewhere, with *path* before what is on the import path anyway."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_")}
    paths = [*([str(path)] if path else []), *filter(None, [clean.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=program.parent.parent, env={**clean, "PYTHONPATH": os.pathsep.join(paths), **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def named(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As README.md says for a package that is not installed."""
    return run(PACKAGE / "main.py", *arguments, path=PACKAGE, RLINF_EXT_MODULE="desk_arm.hardware")


def test_by_the_variable():
    done = named()
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "node 0 has 1 DeskArm: DESK-0042"
    assert second.startswith("Desk 1 DESK-0042 at /dev/pts/")
    assert second.endswith(" stands at 30 degrees")
    assert "hardware: " not in done.stderr  # a fault that the node's probe has found


@pytest.mark.parametrize(
    ("port", "reason"),
    [("/dev/no-such-arm", "No such file or directory"), ("/dev/null", "Inappropriate ioctl for device")],
)
def test_an_arm_that_is_not_there(port, reason):
    done = named(port)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"cluster.node_groups[0].hardware.configs[0].port: no arm answers at {port}: " in last
    assert reason in last
    assert last.endswith(f"(on node {os.uname().nodename})")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Directory that the package was installed in: by pip where its build backend is, else as pip would. Offline."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    if importlib.util.find_spec("hatchling"):
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
        pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(source)]
        subprocess.run(pip, check=True, capture_output=True)
        return site
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    shutil.copytree(source / "desk_arm", site / "desk_arm")
    info = site / f"desk_arm-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site


def test_installed_it_is_found_by_itself(installed, tmp_path):
    program = tmp_path / "elsewhere" / "main.py"
    program.parent.mkdir()
    shutil.copy(PACKAGE / "main.py", program)
    done = run(program, path=installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("node 0 has 1 DeskArm: DESK-0042\n")


def test_without_either_the_error_says_what_to_do():
    done = run(PACKAGE / "main.py")
    assert done.returncode == 1
    assert "there is no hardware type 'DeskArm'" in done.stderr
    assert "by an installed package, or by the module that RLINF_EXT_MODULE names" in done.stderr
