"""`mapped_agentd.py PLACE USER KEY ARGUMENT ...`: run agentd as a user of PLACE/passwd, with the key file KEY.

USER is root, the name of a user, or `+NAME` for a user with the capabilities of rlinf-agentd.service. agentd gets the
key as an inherited descriptor, which a user who is not root could not open.

`mapped_agentd.py PLACE` only arranges this mount namespace as below.

agentd has a mount namespace of its own, in which /etc/passwd and /etc/group are those of PLACE, and in which other
users can read the interpreter and the project.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAPABILITIES = ",+chown,+kill,+setgid,+setuid,+sys_ptrace"
sys.path.insert(0, str(ROOT / "tests" / "live"))

from other_user import _NEWNS, show  # noqa: E402


def arrange(place: str) -> None:
    """Show in this mount namespace the accounts of *place*, and the interpreter and the project to all users."""
    show([Path(sys.base_prefix), Path(sys.prefix), ROOT], Path(place))
    for name in ("passwd", "group"):
        subprocess.run(["mount", "--bind", f"{place}/{name}", f"/etc/{name}"], check=True)


def main() -> None:
    place, user, key, *arguments = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNS):
        sys.exit(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    arrange(place)
    os.chdir(ROOT)
    descriptor = os.open(key, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    command = [sys.executable, "-m", "agentd", *arguments, "--key-fd", str(descriptor)]
    if user != "root":
        name = user.removeprefix("+")
        become = [
            "setpriv",
            "--reuid",
            name,
            "--regid",
            "lab",
            "--init-groups",
            "--bounding-set",
            f"-all{CAPABILITIES}",
        ]
        become += [f"--inh-caps=-all{CAPABILITIES}", f"--ambient-caps=-all{CAPABILITIES}"] if user != name else []
        home = f"{place}/home-{name}"
        os.environ.update(HOME=home, USER=name, LOGNAME=name, XDG_CONFIG_HOME=f"{home}/.config")
        command = [*become, *command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    arrange(sys.argv[1]) if len(sys.argv) == 2 else main()
