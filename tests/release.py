"""Make a release: ``python -m tests.release 0.2.0``. Checks, builds, commits and tags; pushes nothing."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE = ROOT / "rlinf_actors" / "version.py"
NUMBER = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def problems(version: str, changes: str, status: str, tags: str) -> list[str]:
    """Return the reasons why *version* cannot be released: its number, CHANGELOG.md, the checkout or a tag."""
    found = []
    if not NUMBER.fullmatch(version):
        found.append(f"{version!r} is no version such as 0.2.0 or 0.2.0rc1")
    if not re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## {version}'")
    if status:
        found.append(f"the checkout has changes:\n{status}")
    if f"v{version}" in tags.split():
        found.append(f"there is a tag v{version} already")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args().version
    found = problems(
        version, (ROOT / "CHANGELOG.md").read_text(), run("git", "status", "--porcelain"), run("git", "tag")
    )
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    before = VERSION_FILE.read_text()
    VERSION_FILE.write_text(re.sub(r'VERSION = "[^"]*"', f'VERSION = "{version}"', before))
    try:
        subprocess.run([ROOT / ".ci/run"], cwd=ROOT, check=True)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", ".")
    except subprocess.CalledProcessError as error:
        VERSION_FILE.write_text(before)
        print(f"not released: {error}", file=sys.stderr)
        return 1
    run("git", "commit", "-q", "-am", f"release: {version}")
    run("git", "tag", "-a", f"v{version}", "-m", f"rlinf-actors {version}")
    print(f"dist/ has the wheel; publish with: git push origin HEAD v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
