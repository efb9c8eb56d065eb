"""Ray's environment, which keeps its dependencies apart from ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RAY_PYTHON = "RLINF_BENCH_RAY_PYTHON"
"""Environment variable with the path of an interpreter that has Ray."""
REQUIREMENTS = ("ray==2.*", "numpy")
TORCH = "torch==2.13.0"


def default_folder() -> Path:
    """Return the default directory of the environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "rlinf-actors", "ray-venv")


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def find(given: str | None) -> str | None:
    """Return Ray's interpreter: *given*, that of the environment variable, or the default one; None if it is missing.

    Raises:
        FileNotFoundError: *given*, or the variable's interpreter, does not exist.
    """
    named = given or os.environ.get(RAY_PYTHON)
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"{named} is to be the interpreter that has Ray, and cannot be run")
        return named
    default = python_of(default_folder())
    return str(default) if default.exists() else None


def set_up(folder: Path, torch_index: str | None, with_torch: bool = True) -> Path:
    """Make the environment, or install the missing packages in an existing one.

    Args:
        folder: directory of the environment.
        torch_index: an index with a CPU build of torch; without one, what pip is configured to use.
        with_torch: whether to install torch (the cases with torch need it).

    Returns:
        The interpreter.

    Raises:
        subprocess.CalledProcessError: pip failed, and said why.
    """
    python = python_of(folder)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*install, *REQUIREMENTS], check=True)
    if with_torch:
        index = ["--index-url", torch_index] if torch_index else []
        subprocess.run([*install, *index, TORCH], check=True)
    return python
