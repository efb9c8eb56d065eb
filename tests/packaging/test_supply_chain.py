"""What is installed beside us: pinned with hashes, described in the wheel, each dependency for a reason, no bound
without one; and the same sources make the same wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.supply_chain import SBOM, locked, name_of, pins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(one) for one in PROJECT["dependencies"]]
OPTIONAL = [Requirement(one) for one in PROJECT["optional-dependencies"]["cli"]]
PAGE = (ROOT / "docs/reference/dependencies.md").read_text()


def test_the_lock_file_has_the_tested_version_of_each_dependency_with_hashes():
    found, tested = locked(), pins()
    assert {name_of(one.name) for one in [*DEPENDENCIES, *OPTIONAL]} <= set(found)
    assert all(hashes for _, hashes in found.values())
    for name, (version, _) in found.items():
        assert version in tested.get(name, {version}), f"{name}: python -m tests.supply_chain"


def test_the_wheels_bill_of_materials_is_the_lock_file():
    told = json.loads(SBOM.read_text())
    assert told["metadata"]["component"]["name"] == "rlinf-actors"
    assert {name_of(one["name"]): one["version"] for one in told["components"]} == {
        name: version for name, (version, _) in locked().items()
    }


def test_a_dependency_has_an_upper_bound_only_where_the_page_says_what_breaks():
    for one in [*DEPENDENCIES, *OPTIONAL]:
        bounds = [str(part) for part in one.specifier if part.operator in {"<", "<=", "==", "~=", "!="}]
        assert all(f"`{one.name}{bound}`" in PAGE for bound in bounds), one


@pytest.mark.parametrize("extra", ["", "cli", "torch"])
def test_the_page_says_why_each_dependency_is_there(extra):
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for one in map(Requirement, wanted):
        assert re.search(rf"^\| {re.escape(one.name)} \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE), one.name


@pytest.mark.slow
def test_the_same_sources_make_the_same_wheel(tmp_path):
    pytest.importorskip("build")
    wheels = []
    for place in ("here", "elsewhere"):
        copy = tmp_path / place
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
            os.utime(copy / name, (len(wheels) * 10**9, len(wheels) * 10**9))
        command = [sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", str(tmp_path / place)]
        subprocess.run(command, cwd=copy, check=True, env={**os.environ, "TZ": f"UTC{len(wheels)}"})
        wheels.append(next(copy.glob("*.whl")))
    assert len({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}) == 1
    with zipfile.ZipFile(wheels[0]) as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".dist-info/sboms/sbom.cdx.json")]
