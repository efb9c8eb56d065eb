"""Whether namespaces can be made here: root of a container often cannot."""

from __future__ import annotations

import os
import shutil
import subprocess


def can_unshare(*arguments: str) -> bool:
    """Whether ``unshare`` with these arguments, a command among them, works here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", *arguments], capture_output=True, check=False).returncode == 0
