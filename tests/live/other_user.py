"""`other_user.py UID PLACE SCRIPT ...`: run a script as another user of this machine. Starts as root.

Where that user could not run this interpreter (it lies in somebody's home directory), it is shown to it in a mount
namespace of its own. PLACE is the user's home and directory for temporary files.
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


def show(prefix: Path, place: Path) -> None:
    """Hide the directory that keeps others from *prefix* behind an empty one that leads to it."""
    top = closed_above(prefix)
    if top is None:
        return
    aside = place / "aside"
    aside.mkdir()
    mount = lambda *arguments: subprocess.run(["mount", *map(str, arguments)], check=True)  # noqa: E731
    mount("--bind", prefix, aside)
    mount("-t", "tmpfs", "-o", "mode=755", "none", top)
    prefix.mkdir(parents=True)
    mount("--move", aside, prefix)
    aside.rmdir()


def main() -> None:
    uid, place, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNS):
        sys.exit(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    show(Path(sys.base_prefix), Path(place))
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
