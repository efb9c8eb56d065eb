"""Keep the logs of private clusters in which a worker or call failed, when the run directory is removed.

The driver calls `keep` after its agentd has ended; agentd calls it if its driver has died. If the logs cannot be moved,
they are removed with the run directory, and the caller logs the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

KEPT_RUNS = 20
"""Number of private clusters whose logs are kept; the oldest are removed."""
KEPT_BYTES = 512 << 20
"""Limit of all kept logs together, in bytes. The newest run's logs are always kept; `log_max_mb` limits their files."""
_RUN = re.compile(r"rlinf-actors-\d{8}-\d{6}-")
"""Beginning of the name of a kept run's directory. Other directories in the same place are not removed."""
_LOGS = ("logs", "agentd.log")
"""The entries of a run directory that are kept."""
REASON = "reason.txt"
"""The file beside them that says why."""


def keep(run_dir: str, parent: str, why: str) -> str:
    """Move the logs of a private cluster from its run directory *run_dir* to a new directory in *parent*.

    A file there says *why*, for people who find the directory later.
    Then remove the oldest kept logs in *parent* until at most KEPT_RUNS directories and KEPT_BYTES bytes are left.

    Returns:
        The new directory, "" if there were no logs.

    Raises:
        OSError: the logs cannot be moved.
    """
    found = [Path(run_dir, name) for name in _LOGS if Path(run_dir, name).exists()]
    if not found:
        return ""
    Path(parent).mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = Path(parent, f"rlinf-actors-{time.strftime('%Y%m%d-%H%M%S')}-{os.path.basename(run_dir)}")
    kept.mkdir(mode=0o700)
    for path in found:
        shutil.move(path, kept / path.name)
    kept.joinpath(REASON).write_text(f"{why}\n")
    _trim(Path(parent), kept)
    return str(kept)


def _trim(parent: Path, newest: Path) -> None:
    """Remove the oldest kept logs in *parent* until the rest is within KEPT_RUNS and KEPT_BYTES.
    Never remove *newest*.
    """
    runs = sorted((path for path in parent.iterdir() if _RUN.match(path.name) and path != newest), reverse=True)
    taken = _size(newest)
    for number, run in enumerate(runs, 2):
        taken += _size(run)
        if number > KEPT_RUNS or taken > KEPT_BYTES:
            shutil.rmtree(run, ignore_errors=True)  # another driver's end may be at it too


def _size(directory: Path) -> int:
    """Return how many bytes the files below *directory* have together. A file that is removed meanwhile counts as 0."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
