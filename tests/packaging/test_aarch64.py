"""Robots' computers are often aarch64: every dependency has a wheel for them, so that nothing is compiled there."""

from __future__ import annotations

import sys

import aarch64
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = [line.split() for line in aarch64.TABLE.read_text().splitlines()]


def declared(python: str) -> set[str]:
    """What an installation with torch and the command line needs with that Python."""
    project = tomllib.loads((aarch64.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(line) for line in (*project["dependencies"], *extras["torch"], *extras["cli"])]
    environment = {"python_version": python, "platform_machine": "aarch64"}
    return {canonicalize_name(one.name) for one in wanted if one.marker is None or one.marker.evaluate(environment)}


@pytest.mark.parametrize("python", aarch64.PYTHONS)
def test_every_dependency_is_pinned_and_has_an_aarch64_wheel(python):
    pinned = aarch64.pins(python)
    assert declared(python) - {canonicalize_name(name) for name in pinned} == set(), "pin it in constraints.txt"
    recorded = {name: parse_wheel_filename(file) for minor, name, file in TABLE if minor == python}
    assert {name: str(version) for name, (_, version, _, _) in recorded.items()} == pinned, (
        "run python -m tests.aarch64 --write"
    )
    minor = int(python.partition(".")[2])
    for name, (named, _, _, tags) in recorded.items():
        assert named == canonicalize_name(name)
        assert any(fits(tag, minor) for tag in tags), f"{name} has no wheel for aarch64 with Python {python}"


def fits(tag, minor):
    """True if Python 3.*minor* of glibc 2.28 on aarch64 takes a wheel with that tag."""
    if tag.platform == "any":
        return tag.interpreter == "py3" and tag.abi == "none"
    glibc = ["manylinux2014_aarch64", *(f"manylinux_2_{number}_aarch64" for number in aarch64.GLIBC)]
    stable = tag.abi == "abi3" and int(tag.interpreter.removeprefix("cp3")) <= minor
    program = (tag.interpreter, tag.abi) == ("py3", "none")  # it needs no certain Python
    return tag.platform in glibc and (program or stable or tag.interpreter == tag.abi == f"cp3{minor}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", aarch64.PYTHONS)
def test_the_index_has_these_wheels(python, request):
    if not request.config.getoption("look_up"):
        pytest.skip("asks the package index: --look-up")
    assert aarch64.asked(python) == {name: file for minor, name, file in TABLE if minor == python}
