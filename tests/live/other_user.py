"""`other_user.py UID PLACE SCRIPT ...`: run a script as another user of this machine. Starts as root.

Where that user could not read this interpreter or the script (in somebody's home directory), they are shown to it in a
mount namespace of its own. PLACE is the user's home and directory for temporary files.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_NEWNS = 0x00020000
"""CLONE_NEWNS of sched.h."""


def closed_above(path: Path) -> Path | None:
    """The uppermost directory on the way to *path* that others may not enter."""
    return next((one for one in reversed([path, *path.parents]) if not one.stat().st_mode & 0o001), None)


def show(wanted: list[Path], place: Path) -> None:
    """Hide each directory that keeps others from what is *wanted* behind an empty one that leads there."""
    closed = {path: top for path in wanted if path.is_dir() and (top := closed_above(path)) is not None}
    least = [path for path in closed if not any(other in path.parents for other in closed)]
    mount = lambda *arguments: subprocess.run(["mount", *map(str, arguments)], check=True)  # noqa: E731
    asides = [place / f"aside{number}" for number in range(len(least))]
    for path, aside in zip(least, asides, strict=True):
        aside.mkdir()
        mount("--bind", path, aside)
    for top in {closed[path] for path in least}:
        mount("-t", "tmpfs", "-o", "mode=755", "none", top)
    for path, aside in zip(least, asides, strict=True):
        path.mkdir(parents=True)
        mount("--move", aside, path)
        aside.rmdir()


def main() -> None:
    uid, place, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNS):
        sys.exit(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    imports = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    show([Path(sys.base_prefix), Path(sys.prefix), Path(command[0]).resolve().parent, *imports], Path(place))
    os.chown(place, int(uid), int(uid))
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "XDG_"))}
    mark = {name: value for name, value in os.environ.items() if name == "RLINF_ACTORS_TEST"}
    os.chdir(place)
    os.execve(sys.executable, [sys.executable, *command], {**kept, **mark, "HOME": place, "TMPDIR": place})


if __name__ == "__main__":
    main()
