"""Environments of other interpreters, and of other packages: what nodes of one job may differ in."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

RUNTIME = ("pyzmq", "msgspec", "cloudpickle")
"""What an interpreter needs to run workers; the project itself comes from agentd."""
RUNTIME_310 = ("taskgroup", "exceptiongroup", "typing_extensions", "tomli")
"""What Python 3.10 needs beside that."""


def interpreter(minor: int) -> str | None:
    """Return a Python 3.*minor* that is not this one's, None where there is none."""
    name = f"python3.{minor}"
    for place in (Path.home() / ".pyenv" / "versions", Path("/usr/bin")):
        for path in sorted(place.glob(f"3.{minor}.*/bin/{name}")) or [place / name]:
            if path.exists() and subprocess.run([path, "-c", "pass"], check=False).returncode == 0:
                return str(path)
    return None


def installed(folder: Path, python: str, *packages: str) -> str:
    """Make a virtual environment of *python* with just these packages from the index, not what those require.

    An environment that is there already is used as it is. pip is this environment's: to install one there takes longer
    than all else. Returns its interpreter.
    """
    exe = folder / "bin" / "python"
    if not exe.exists():
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, stdin=subprocess.DEVNULL)
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
