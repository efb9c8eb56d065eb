"""`rlinf-actors doctor --bundle`: writes an archive for a bug report, without secrets and without data of users."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlinf_actors.cli.doctor.cluster import ANSWER_S, ClusterFacts
from rlinf_actors.cli.doctor.redaction import Redactor
from rlinf_actors.cli.job_command import jobs_of
from rlinf_actors.cli.output import check_directory
from rlinf_actors.cli.queries import observing
from rlinf_actors.cli.views import group_dict, node_dict, summary, worker_dict
from rlinf_actors.config_files import read_text
from rlinf_actors.errors import ConfigError, RlinfActorsError, UsageError
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.runtime.progress import Facts, showing_blocked
from rlinf_actors.security import keyfile
from rlinf_actors.settings import Settings
from rlinf_actors.toml_text import parse_toml
from rlinf_actors.version import VERSION
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion
from rlinf_actors.wire.client_messages import Events, GetEvents, Status
from rlinf_actors.wire.event_values import ClusterEvent, event_dict
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.protocol import expected

EVENTS = 2000
"""Most events in the archive, the newest."""
JOURNAL_LINES = 1000
JOURNAL_S = 15.0
CONFIG_DIR = Path("/etc/rlinf-actors")
UNITS = ("rlinf-head.service", "rlinf-agentd*", "rlinf-workers*")
ABOUT = """rlinf-actors {version}: archive of `rlinf-actors doctor --bundle`, {at}

doctor.json    what doctor found, and the facts of the nodes
status.json    the cluster; nodes.json, jobs.json, groups.json, workers.json: its parts
events.jsonl   the last events of the cluster
logs/          the last lines of agentds, and of this machine's journal of the units
config/        configuration files of this machine, as JSON
versions.json  this machine's system, Python and packages
missing.txt    what could not be read, and why

Removed: keys, tokens, passwords, values of environment variables, output of workers, messages of exceptions.
In it are: names of nodes, users, jobs, groups and scripts, IP addresses, and paths. Look at it before you send it.
"""


class _Archive:
    """The files of the archive. Each text goes through the redactor."""

    def __init__(self, redactor: Redactor) -> None:
        self.files: dict[str, bytes] = {}
        self.missing: list[str] = []
        self._redactor = redactor

    def add_json(self, name: str, value: Any) -> None:
        self.files[name] = json.dumps(self._redactor.value(value), indent=2, ensure_ascii=False).encode()

    def add_objects(self, name: str, values: Iterable[Any]) -> None:
        """Add JSON objects, one in each line."""
        lines = (json.dumps(self._redactor.value(value), ensure_ascii=False) for value in values)
        self.files[name] = "".join(f"{line}\n" for line in lines).encode()

    def add_lines(self, name: str, lines: Iterable[str]) -> None:
        """Add a text. Messages of exceptions are found in each line by itself."""
        self.files[name] = "".join(f"{self._redactor.text(line)}\n" for line in lines).encode(errors="replace")

    def fail(self, what: str, error: object) -> None:
        self.missing.append(f"{what}: {error}")

    def write(self, path: Path) -> None:
        """Write the archive, which only this user can read. Raise UsageError if that fails."""
        self.add_lines("missing.txt", self.missing or ["nothing"])
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, data in sorted(self.files.items()):
                entry = tarfile.TarInfo(f"rlinf-actors-bundle/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))


def check_new(path: Path) -> None:
    """Raise UsageError if *path* exists, or its directory does not."""
    if path.exists():
        raise UsageError(f"{path} exists already: name another file, or remove it")
    check_directory(path)


def write_bundle(
    path: Path, diagnosis: Mapping[str, Any], settings: Settings, endpoint: str, status: Status | None,
    cluster: ClusterFacts,
) -> list[str]:  # fmt: skip
    """Write the archive *path*, and return what is missing in it, for people. Blocks.

    Args:
        diagnosis: what doctor found, as JSON.
        endpoint, status: the head and its answer; "" and None without one.
        cluster: what the nodes have said.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    archive = _Archive(Redactor(_secrets(settings, status)))
    at = time.strftime("%Y-%m-%d %H:%M:%S %z")
    archive.files["REDACTED.txt"] = ABOUT.format(version=VERSION, at=at).encode()
    archive.add_json("doctor.json", diagnosis)
    archive.add_json("versions.json", _versions())
    _add_config(archive, settings)
    _add_journal(archive)
    if status is not None:
        now = status.at
        archive.add_json("status.json", summary(endpoint, status))
        archive.add_json("nodes.json", [node_dict(node) for node in status.nodes])
        archive.add_json("jobs.json", jobs_of(status))
        archive.add_json("groups.json", [group_dict(group) for group in status.groups])
        every = [worker_dict(group, worker, now) for group in status.groups for worker in group.workers]
        archive.add_json("workers.json", every)
        try:
            asyncio.run(_add_cluster(archive, settings, endpoint, cluster))
        except RlinfActorsError as error:
            archive.fail("events.jsonl, logs", error)
    archive.write(path)
    return archive.missing


def _secrets(settings: Settings, status: Status | None) -> list[str]:
    """Return the secrets that this process knows: of key files, of the environment, of groups."""
    found = [value for name, value in os.environ.items() if _is_secret(name)]
    for role in keyfile.ROLES:
        with contextlib.suppress(ConfigError, OSError):
            path = keyfile.locate(settings, role)
            if path is not None:
                found.append(keyfile.load(path).pair.secret)
    return found + [group.token for group in (status.groups if status is not None else ())]


def _is_secret(name: str) -> bool:
    words = ("TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL", "AUTH", "PRIVATE", "COOKIE", "WEBHOOK")
    places = ("RLINF_ACTORS_KEYS", "SSH_AUTH_SOCK", "XAUTHORITY")
    return any(word in name.upper() for word in words) and name not in places


def _versions() -> dict[str, Any]:
    distributions = importlib.metadata.distributions()
    packages = {str(one.metadata["Name"]): one.version for one in distributions if one.metadata["Name"]}
    return {
        "rlinf-actors": VERSION,
        "system": " ".join(platform.uname()[:1] + platform.uname()[2:5]),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
    }


def _add_config(archive: _Archive, settings: Settings) -> None:
    """Add the configuration files, without comments: one may have a secret."""
    chosen = Path(settings.config_file) if settings.config_file else CONFIG_DIR / "agentd.toml"
    client = Path(settings.config_home).expanduser() / "rlinf-actors" / "client.toml"
    files = [chosen, *sorted((chosen.parent / "agentd.d").glob("*.toml")), CONFIG_DIR / "head.toml", client]
    for path in files:
        try:
            archive.add_json(f"config{path.absolute()}.json", parse_toml(read_text(path), str(path)))
        except (OSError, ConfigError, ValueError) as error:
            if path.exists():
                archive.fail(str(path), error)


def _add_journal(archive: _Archive) -> None:
    """Add the journal of the units on this machine, if it has one."""
    command = ["journalctl", "--no-pager", "-o", "short-iso", "-n", str(JOURNAL_LINES)]
    command += [word for unit in UNITS for word in ("-u", unit)]
    try:
        with showing_blocked(lambda: Facts("reading the journal of the units")):
            done = subprocess.run(command, capture_output=True, errors="replace", timeout=JOURNAL_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        archive.fail("logs/journal.txt", error)
        return
    if done.returncode == 0:
        archive.add_lines("logs/journal.txt", done.stdout.splitlines())
    else:
        archive.fail("logs/journal.txt", done.stderr.strip() or f"journalctl exited with {done.returncode}")


async def _add_cluster(archive: _Archive, settings: Settings, endpoint: str, cluster: ClusterFacts) -> None:
    async with observing(endpoint, settings) as client:
        try:
            archive.add_objects("events.jsonl", map(event_dict, await _events(client)))
        except RlinfActorsError as error:
            archive.fail("events.jsonl", error)
        for id in cluster.facts:
            name = "".join(char if char.isalnum() or char in "-_." else "_" for char in cluster.name(id))
            try:
                reply = await client.request(AskNode(id, CheckQuestion(log=True)), ANSWER_S)
                archive.add_lines(f"logs/agentd-{name}.txt", answer_of(reply, CheckAnswer).log)
            except RlinfActorsError as error:
                archive.fail(f"logs/agentd-{name}.txt", error)


async def _events(client: ControlClient) -> list[ClusterEvent]:
    """Return the last events."""
    since, log = 0, ""
    kept: list[ClusterEvent] = []
    while True:
        answer = expected(await client.request(GetEvents(since, log), ANSWER_S), Events)
        since, log = answer.next, answer.log
        kept = [*kept, *answer.events][-EVENTS:]
        if not answer.more:
            return kept
