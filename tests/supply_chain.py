"""The lock file and the SBOM: ``python -m tests.supply_chain`` makes both anew from pyproject.toml and constraints.txt.

requirements.lock has the hashes of all files of the tested packages, for every supported Python; .ci/sbom.cdx.json
is the software bill of materials in the wheel's metadata (PEP 770). It needs uv and cyclonedx-bom, and an index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
LOCK = ROOT / "requirements.lock"
SBOM = ROOT / ".ci" / "sbom.cdx.json"
HEAD = """\
# What an installation that checks hashes installs: the tested releases of all dependencies, with the extra `cli`.
#     pip install --require-hashes -r requirements.lock && pip install --no-deps .
# After a change of pyproject.toml or constraints.txt: python -m tests.supply_chain
"""
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? \\$", re.MULTILINE)


def name_of(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, set[str]]:
    """Return the versions that constraints.txt pins, by package. Of some there is another version for Python 3.10."""
    found: dict[str, set[str]] = {}
    for line in PINS.read_text().splitlines():
        if said := line.partition("#")[0].strip():
            wanted = Requirement(said)
            found.setdefault(name_of(wanted.name), set()).add(next(iter(wanted.specifier)).version)
    return found


def locked() -> dict[str, tuple[str, int]]:
    """Return the version of each package of the lock file, and how many hashes it has."""
    text = LOCK.read_text()
    found = list(_PIN.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    return {
        name_of(one["name"]): (one["version"], text.count("--hash=sha256:", one.end(), end))
        for one, end in zip(found, ends, strict=True)
    }


def main() -> int:
    """Write both files."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as tested:
        tested.writelines(line for line in PINS.open() if not line.startswith("torch"))  # each platform has its own
        tested.flush()
        subprocess.run(
            [
                "uv", "pip", "compile", "pyproject.toml", "--extra", "cli", "-c", tested.name, "--universal",
                "--python-version", "3.10", "--generate-hashes", "--no-header", "--no-annotate", "-q",
            ], cwd=ROOT, check=True, stdout=LOCK.open("w"),
        )  # fmt: skip
    LOCK.write_text(HEAD + LOCK.read_text())
    found = "".join(f"{name}=={version}\n" for name, (version, _) in locked().items())
    subprocess.run(
        [
            "cyclonedx-py", "requirements", "-", "--pyproject", "pyproject.toml", "--mc-type", "library",
            "--output-reproducible", "-o", str(SBOM),
        ], cwd=ROOT, check=True, input=found, text=True,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
