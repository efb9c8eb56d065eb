"""Runs programs on Ray: apart from other Ray clusters of the machine, and without leftovers."""

from __future__ import annotations

import os
import shutil


def apart(python: str, directory: str) -> tuple[list[str], dict[str, str]]:
    """Return a command and variables that run `python` with a Ray of its own, whose files are in `directory`.

    Ray joins any cluster whose processes it sees. Root runs it in a PID namespace, where it sees none, and which ends
    what Ray leaves. Without root, stop other clusters first, and run `ray stop` afterwards.
    """
    variables = {"RAY_TMPDIR": directory}
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return [python], variables
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", python], variables
