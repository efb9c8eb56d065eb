"""What py-spy needs on a machine: the program, and leave to trace. Any thread."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rlinf_actors import procfs

YAMA = "/proc/sys/kernel/yama/ptrace_scope"


def find_py_spy() -> str:
    """Return the path of py-spy: beside this interpreter, or on PATH. "" if there is none."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


def yama() -> int:
    """Return kernel.yama.ptrace_scope, 0 in a kernel without Yama."""
    text = procfs.text_of(YAMA).strip()
    return int(text) if text.isdigit() else 0
