"""Removes what `rlinf-actors units install` has installed: stops and disables the units, then removes their files.

`find` looks and changes nothing; `carry_out` does it. Blocking; any thread.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_actors.errors import ConfigError
from rlinf_actors.systemd import unit_files

READ_BY_SYSTEMD = ("/etc/systemd/system", "/run/systemd/system")
"""Directories whose units the running systemd has loaded, so that they must be stopped first."""
BOOTED = "/run/systemd/system"
"""Exists while systemd runs as process 1 (sd_booted(3))."""
STOP_S = 300.0
"""Seconds that the units may take to stop: longer than TimeoutStopSec= of each."""
LEFT = (
    "/etc/rlinf-actors",
    "/var/lib/rlinf-head",
    "/var/lib/rlinf-agentd",
    "/var/log/rlinf-agentd",
)
"""Configuration, keys, state and logs, which a removal leaves."""
_STOP_ORDER = (unit_files.AGENTD, unit_files.ROOT_AGENTD, unit_files.WORKERS, unit_files.ROOT_WORKERS, unit_files.HEAD)


@dataclass(frozen=True)
class Removal:
    """What there is to remove.

    Attributes:
        units: the units to stop and disable, in this order.
        running: those of them that run now.
        files: the files and links to remove.
        kept: files that are not removed, because a person has changed or made them.
        left: other files and directories of an installation, which are not removed.
    """

    units: list[str]
    running: list[str]
    files: list[Path]
    kept: list[Path]
    left: list[str]


def find(directory: Path, force: bool = False, left: Sequence[str] = LEFT) -> Removal:
    """Return what there is to remove in *directory*. *force* removes files that a person has changed, too.

    Raises:
        OSError: a file cannot be read, or systemctl cannot be run.
    """
    files: list[Path] = []
    kept: list[Path] = []
    for name in (*unit_files.UNITS, *unit_files.DROP_INS, unit_files.TMPFILES):
        path = unit_files.place(directory, name)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue
        (files if force or unit_files.is_ours(text) else kept).append(path)
    for name in unit_files.UNITS:
        kept += [path for path in sorted(directory.glob(f"{_instances(name)}.d/*")) if path not in (*files, *kept)]
    enabled = [
        link for name in unit_files.UNITS for link in sorted(directory.glob(f"*.wants/{_instances(name)}"))
    ]  # fmt: skip
    running = _running() if is_live(directory) else []
    units = dict.fromkeys([*running, *(link.name for link in enabled)])
    there = [path for path in left if os.path.exists(path)]
    return Removal(sorted(units, key=_order), sorted(running, key=_order), [*files, *enabled], kept, there)


def is_live(directory: Path) -> bool:
    """Return True if the running systemd reads units in *directory*."""
    return os.path.isdir(BOOTED) and str(directory.absolute()) in READ_BY_SYSTEMD


def carry_out(removal: Removal, directory: Path) -> None:
    """Stop and disable the units, then remove the files, and make systemd forget them.

    Raises:
        ConfigError: systemctl has failed; its words are in the message, and no file was removed.
        OSError: a file cannot be removed.
    """
    live = is_live(directory)
    if live and removal.units:
        _systemctl("disable", "--now", *removal.units)
    for path in removal.files:
        path.unlink(missing_ok=True)  # `systemctl disable` has removed the links
    for parent in {path.parent for path in removal.files if directory in path.parent.parents}:
        with contextlib.suppress(OSError):  # files of other units, or of a person, are in it
            parent.rmdir()
    if live:
        _systemctl("daemon-reload")
        if removal.units:
            with contextlib.suppress(ConfigError):  # a unit that did not fail is not known any more
                _systemctl("reset-failed", *removal.units)


def _instances(name: str) -> str:
    """Return a pattern of the names of a unit: of a template those of its instances and its own."""
    return name.replace("@.", "@*.")


def _order(unit: str) -> tuple[int, str]:
    kinds = (number for number, name in enumerate(_STOP_ORDER) if fnmatch.fnmatch(unit, _instances(name)))
    return next(kinds, len(_STOP_ORDER)), unit


def _running() -> list[str]:
    states = "--state=active,activating,deactivating,reloading"
    patterns = [_instances(name) for name in unit_files.UNITS]
    said = _systemctl("list-units", "--full", "--plain", "--no-legend", "--no-pager", states, *patterns)
    return [line.split()[0] for line in said.splitlines() if line.strip()]


def _systemctl(*words: str) -> str:
    done = subprocess.run(
        ["systemctl", *words], capture_output=True, text=True, check=False, timeout=STOP_S, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = done.stderr.strip() or f"it ended with exit code {done.returncode}"
        raise ConfigError(f"has failed: {said}", path=f"systemctl {' '.join(words)}")
    return done.stdout
