"""Environments of other interpreters, and of other packages: what nodes of one job may differ in."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

RUNTIME = ("pyzmq", "msgspec", "cloudpickle")
"""What an interpreter needs to run workers; the project itself comes from agentd."""


def interpreter(minor: int) -> str | None:
    """Return a Python 3.*minor* that is not this one's, None where there is none."""
    name = f"python3.{minor}"
    for place in (Path.home() / ".pyenv" / "versions", Path("/usr/bin")):
        for path in sorted(place.glob(f"3.{minor}.*/bin/{name}")) or [place / name]:
            if path.exists() and subprocess.run([path, "-c", "pass"], check=False).returncode == 0:
                return str(path)
    return None


def make_venv(folder: Path, python: str, packages: Sequence[str]) -> str:
    """Make a virtual environment with *packages* from the index, unless it is there; returns its interpreter."""
    exe = folder / "bin" / "python"
    if not exe.exists():
        subprocess.run([python, "-m", "venv", folder], check=True, stdin=subprocess.DEVNULL)
        command = [exe, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    return str(exe)


def installed(folder: Path, python: str, *packages: str) -> str:
    """Make a virtual environment of *python* with just these packages from the index, not what those require.

    pip is this environment's: to install one there takes longer than all else. Returns its interpreter.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, stdin=subprocess.DEVNULL)
    exe = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", exe, "install", "-q", "--disable-pip-version-check"]
    command = [*pip, "--only-binary=:all:", "--no-deps", "--no-compile", *packages]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    return str(exe)


def without(folder: Path, *packages: str) -> str:
    """Make a virtual environment with all that this one has but *packages*; returns its interpreter."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            named = path.name.lower().startswith(tuple(f"{name}{end}" for name in packages for end in ("-", ".")))
            if path.name != "__pycache__" and path.name not in packages and not named:
                (own / path.name).symlink_to(path)
    return str(folder / "bin" / "python")
