"""Environments with another version: the code of the previous protocol, from the commit that previous.txt names.

Virtual environments without pip: the code comes from this repository, all other packages from the environment of the
tests. After a release that raises the protocol, previous.txt gets the last commit before it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT = Path(__file__).with_suffix(".txt").read_text().strip()
PACKAGES = ("rlinf_actors", "agentd")


def install(directory: Path) -> str:
    """Make the environment of the previous version in *directory*; return its interpreter.

    Raises:
        RuntimeError: the commit is not in this clone, or its code cannot be imported; says what to do.
    """
    if _git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode:
        raise RuntimeError(
            f"the previous protocol's code is commit {COMMIT} (tests/compat/previous.txt), which this clone does not "
            "have. A shallow clone gets it by: git fetch --unshallow"
        )
    archive = _git("archive", COMMIT, *PACKAGES)
    (directory / "code").mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", directory / "code"], input=archive.stdout, check=True)
    return _environment(directory)


def install_later(directory: Path) -> str:
    """Make the environment of a later version: today's code with none of today's protocols."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / "code" / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = directory / "code/rlinf_actors/wire/protocol.py"
    path.write_text(re.sub(r"(?m)^(PROTOCOL|OLDEST) = (\d+)$", lambda m: f"{m[1]} = {int(m[2]) + 2}", path.read_text()))
    return _environment(directory)


def _environment(directory: Path) -> str:
    venv.create(directory / "env", symlinks=True)
    python = directory / "env" / "bin" / "python"
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (own,) = (directory / "env" / "lib").glob("python*/site-packages")
    (own / "version.pth").write_text("\n".join([str(directory / "code"), *libraries]) + "\n")
    said = subprocess.run(
        [python, "-c", "import agentd.daemon, rlinf_actors; print(rlinf_actors.__file__)"],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )
    if said.stdout.strip() != str(directory / "code/rlinf_actors/__init__.py"):
        raise RuntimeError(f"the environment in {directory} does not work: {said.stdout}{said.stderr}")
    return str(python)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=False)
