"""The unit files of this package, and a file for systemd-tmpfiles: filled in for this installation, and installed.

An installed file begins with a stamp, the hash of its body. So a file of an earlier version is replaced, and a file
that a person has changed is kept.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rlinf_actors.errors import ConfigError
from rlinf_actors.version import VERSION

HEAD, AGENTD, WORKERS = "rlinf-head.service", "rlinf-agentd@.service", "rlinf-workers@.service"
ROOT_AGENTD, ROOT_WORKERS = "rlinf-agentd.service", "rlinf-workers.service"
"""The units of an agentd that starts the workers of each driver as another user."""
UNITS = (HEAD, AGENTD, WORKERS, ROOT_AGENTD, ROOT_WORKERS)
HARDENED, HARDENED_WORKERS = f"{AGENTD}.d/hardened.conf", f"{WORKERS}.d/hardened.conf"
DROP_INS = (HARDENED, HARDENED_WORKERS, f"{ROOT_AGENTD}.d/hardened.conf", f"{ROOT_WORKERS}.d/hardened.conf")
"""The drop-in files, which `rlinf-actors units install` writes only with --hardened."""
TMPFILES = "rlinf-actors.conf"
"""The file for systemd-tmpfiles, which goes into another directory than units do (`place`)."""
DIRECTORY = "/etc/systemd/system"

_SOURCES = {**{name: name for name in (*UNITS, TMPFILES)}, **dict.fromkeys(DROP_INS, "hardened.conf")}
_STAMP = "# rlinf-actors"


def commands() -> dict[str, str]:
    """Return the command lines of this installation, by the placeholders (such as @AGENTD@) that they replace in unit
    files.
    """
    return {
        "@AGENTD@": _command("agentd", "agentd"),
        "@RLINF_ACTORS@": _command("rlinf-actors", "rlinf_actors.cli.main"),
    }


def _command(script: str, module: str) -> str:
    """Return the command line for a unit file: the installed *script*, else this interpreter with ``-m`` *module*."""
    path = os.path.join(sysconfig.get_path("scripts"), script)
    words = [path] if os.access(path, os.X_OK) else [sys.executable, "-m", module]
    return " ".join(map(escaped, words))


def escaped(word: str) -> str:
    """Return one word of a command line, escaped for a unit file.

    Raises:
        ConfigError: a unit file cannot contain the word.
    """
    if any(ord(char) < 32 for char in word):
        raise ConfigError(
            f"has the path {word!r}, but a unit file cannot contain control characters", path="installation"
        )
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if " " in word or "'" in word or '"' in word else word


def text(name: str, programs: Mapping[str, str] | None = None) -> str:
    """Return the whole text to install as the unit file *name*, with the stamp of this version as its first line.

    *programs* maps the placeholders in the file to command lines; None stands for those of `commands`.
    """
    body = (
        resources.files("rlinf_actors.systemd").joinpath("files").joinpath(_SOURCES[name]).read_text(encoding="utf-8")
    )
    for mark, command in (commands() if programs is None else programs).items():
        body = body.replace(mark, command)
    return f"{_STAMP} {VERSION} {_hash(body)}\n{body}"


def place(directory: Path, name: str) -> Path:
    """Return the path of the file *name* in an installation whose units are in *directory*. TMPFILES is in the
    directory that systemd-tmpfiles reads if systemd reads *directory*, such as /etc/tmpfiles.d, else in one below it.
    """
    if name != TMPFILES:
        return directory / name
    parent = directory.parents[1] if directory.parts[-2:] == ("systemd", "system") else directory
    return parent / "tmpfiles.d" / name


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def is_ours(found: str) -> bool:
    """Return True if *found* is a unit file's text as some version of this package wrote it.

    False means that a person has changed the file, or that it is not this package's.
    """
    first, _, body = found.partition("\n")
    words = first.split()
    return first.startswith(_STAMP) and words[-1] == _hash(body)


@dataclass(frozen=True)
class Step:
    """What `carry_out` does with one unit file.

    Attributes:
        path: the file to install.
        text: what the file will contain.
        what: "written" if the file does not exist yet, "replaced" if another text is replaced, else "unchanged".
    """

    path: Path
    text: str
    what: str


def plan(directory: Path, names: Sequence[str], force: bool) -> list[Step]:
    """Return what installing the unit files *names* into *directory* would do with each file. Changes nothing.

    *force* replaces files that a person has changed, too.

    Raises:
        ConfigError: a person has changed a file, and *force* is False.
        OSError: a file cannot be read.
    """
    steps = []
    for name in names:
        path, wanted = place(directory, name), text(name)
        try:
            found = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            steps.append(Step(path, wanted, "written"))
            continue
        if found != wanted and not is_ours(found) and not force:
            changes = "file of your own in its directory"
            if name != TMPFILES:
                changes = f"drop-in (systemctl edit {name.partition('.d/')[0]})"
            raise ConfigError(
                "was edited, or was not written by rlinf-actors, so it is not replaced. Move the changes into a "
                f"{changes}, then replace the file with --force",
                path=str(path),
            )
        steps.append(Step(path, wanted, "unchanged" if found == wanted else "replaced"))
    return steps


def carry_out(steps: Sequence[Step]) -> None:
    """Write the unit files of a `plan`. Each file is written whole or not at all. Raises OSError if one cannot be
    written.
    """
    for step in steps:
        if step.what == "unchanged":
            continue
        step.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = step.path.with_name(step.path.name + ".rlinf-new")
        try:
            fresh.write_text(step.text, encoding="utf-8")
            fresh.chmod(0o644)
            fresh.replace(step.path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
