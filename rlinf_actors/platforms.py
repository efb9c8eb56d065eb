"""Which operating systems the package runs on. Imports only sys and exit_codes, and works on all of them.

The package installs and imports everywhere, so that editors, type checkers and pytest work. To run anything, it needs
Linux: pidfds, memory of memfd_create(2), and /proc.
"""

from __future__ import annotations

import sys

from rlinf_actors.exit_codes import UNAVAILABLE

_NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin"}
_INSTEAD = {
    "darwin": "in a container or virtual machine, or on a Linux machine by ssh",
    "win32": "in WSL 2 (wsl --install), or on a Linux machine by ssh",
}


def why_not_here(what: str) -> str:
    """Return why *what*, such as "agentd", does not run on this operating system, and what to do; "" on Linux."""
    if sys.platform == "linux":
        return ""
    name = _NAMES.get(sys.platform, sys.platform)
    instead = _INSTEAD.get(sys.platform, "on a Linux machine")
    return f"{what} needs Linux, and this is {name}: run it {instead}"


def end_elsewhere(program: str) -> None:
    """Return on Linux. On another operating system, end this process with a message and the exit code UNAVAILABLE."""
    why = why_not_here(program)
    if why:
        sys.stderr.write(f"error: {why}\n")
        sys.exit(UNAVAILABLE)
