"""The wheels that an aarch64 node installs: ``python -m tests.aarch64 --write`` asks the index, and writes them down.

tests/aarch64.txt has a line for each pinned package and Python: what tests/packaging/test_aarch64.py compares with
constraints.txt, without a network. It needs pip and packaging.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".txt")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
GLIBC = range(17, 29)
"""Minor versions: Debian 10, Ubuntu 20.04 and RHEL 8, or newer, have 2.28."""


def pins(python: str) -> dict[str, str]:
    """Return name to version of what constraints.txt pins for that Python."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    wanted = [Requirement(line) for line in lines if line]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    return {
        one.name: next(iter(one.specifier)).version
        for one in wanted
        if one.marker is None or one.marker.evaluate(environment)
    }


def asked(python: str) -> dict[str, str]:
    """Ask the index for the wheels that pip installs on aarch64 with that Python; returns name to file name.

    Raises:
        RuntimeError: one of them has none.
    """
    platforms = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in GLIBC)]
    wanted = pins(python)
    with tempfile.TemporaryDirectory() as nowhere:
        command = [
            sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-",
            "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--target", nowhere,
            "--implementation", "cp", "--python-version", python, *(f"--platform={name}" for name in platforms),
            *(f"{name}=={version}" for name, version in wanted.items()),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip finds no aarch64 wheels for Python {python}: {done.stderr}")
    urls = [one["download_info"]["url"] for one in json.loads(done.stdout)["install"]]
    files = {url.rpartition("/")[2].partition("-")[0].lower().replace("_", "-"): url.rpartition("/")[2] for url in urls}
    return {name: files[name.lower().replace("_", "-")] for name in wanted}


def lines(wheels: dict[str, dict[str, str]]) -> list[str]:
    """Return the table's lines: Python, name, wheel."""
    return [f"{python} {name} {file}" for python, found in wheels.items() for name, file in found.items()]


def main() -> int:
    """Write the table, or say what is different now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write tests/aarch64.txt")
    found = lines({python: asked(python) for python in PYTHONS})
    if parser.parse_args().write:
        TABLE.write_text("\n".join(found) + "\n")
    changed = sorted(set(found) ^ set(TABLE.read_text().splitlines()))
    print(*changed, sep="\n")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
