"""Logs of private clusters in which something failed: kept when their run directory is removed, up to a bound.

The driver calls `keep` once its agentd has ended; agentd itself does if its driver is gone. Nobody waits for a place
where they cannot be written: they are removed then, and the reason is told.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

KEPT_RUNS = 20
"""Private clusters whose logs are kept; the oldest are removed."""
KEPT_BYTES = 512 << 20
"""What they may take together. The newest stay whatever they take: `log_max_mb` bounds each of their files."""
_RUN = re.compile(r"rlinf-actors-\d{8}-\d{6}-")
"""How the name of a kept run's directory begins. Others in the same place are somebody else's, and are not removed."""
_LOGS = ("logs", "agentd.log")
"""What of a run directory is kept."""


def keep(run_dir: str, parent: str) -> str:
    """Move the logs in *run_dir* to a new directory in *parent*, and remove the oldest there beyond the bounds.

    Returns:
        The new directory, "" if there was nothing to keep.

    Raises:
        OSError: they cannot be moved.
    """
    found = [Path(run_dir, name) for name in _LOGS if Path(run_dir, name).exists()]
    if not found:
        return ""
    Path(parent).mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = Path(parent, f"rlinf-actors-{time.strftime('%Y%m%d-%H%M%S')}-{os.path.basename(run_dir)}")
    kept.mkdir(mode=0o700)
    for path in found:
        shutil.move(path, kept / path.name)
    _trim(Path(parent), kept)
    return str(kept)


def _trim(parent: Path, newest: Path) -> None:
    """Remove the oldest kept runs in *parent*, never *newest*, until the rest is within the bounds."""
    runs = sorted((path for path in parent.iterdir() if _RUN.match(path.name) and path != newest), reverse=True)
    taken = _size(newest)
    for number, run in enumerate(runs, 2):
        taken += _size(run)
        if number > KEPT_RUNS or taken > KEPT_BYTES:
            shutil.rmtree(run, ignore_errors=True)  # another driver's end may be at it too


def _size(directory: Path) -> int:
    """Return the bytes of the files below *directory*; one that is removed meanwhile counts as none."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
