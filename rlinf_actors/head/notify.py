"""The table [notify] of a head's configuration: which program or web page is told of which events. Starts nothing."""

from __future__ import annotations

import os
import re
import stat
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlinf_actors import config_files
from rlinf_actors.conversion import convert
from rlinf_actors.errors import ConfigError
from rlinf_actors.toml_text import parse_toml
from rlinf_actors.wire.event_values import EventKind

DEFAULT_KINDS: tuple[EventKind, ...] = ("worker_died", "node_lost", "estop")
DEFAULT_FILE = Path("/etc/rlinf-actors/head.toml")
TIMEOUT_S = 10.0
MOST_TIMEOUT_S = 600.0
MAX_SECRET = 4096
"""Most characters of a URL or token."""
_UNPRINTED = re.compile(r"[^\x21-\x7e]")


class Notify(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the head does about events.

    Attributes:
        command: the words of a program to run for each event, without a shell; () for none.
        webhook: the URL to which each event is posted, "" for none.
        webhook_file: a file with that URL, for a URL that is a secret; "" for none.
        token_file: a file with the bearer token for the URL, "" for none.
        kinds: the kinds of events.
        timeout_s: seconds that the program, or the request, may take for one event.
    """

    command: tuple[str, ...] = ()
    webhook: str = ""
    webhook_file: str = ""
    token_file: str = ""
    kinds: tuple[EventKind, ...] = DEFAULT_KINDS
    timeout_s: float = TIMEOUT_S

    @property
    def is_used(self) -> bool:
        return bool(self.command or self.webhook or self.webhook_file)


class _HeadToml(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    notify: Notify = Notify()


def checked(notify: Notify) -> Notify:
    """Return *notify* if its values can be used.

    Raises:
        ConfigError: a program, file or URL cannot be used, or other users can read or change a file with a secret.
    """
    if notify.command:
        program = notify.command[0]
        if not os.path.isabs(program):
            raise ConfigError(f"starts {program!r}: give the absolute path of the program", path="notify.command")
        if not os.path.isfile(program) or not os.access(program, os.X_OK):
            text = f"starts {program!r}, which is no program that user {os.geteuid()} may run"
            own = "; rlinf-head.service has a /tmp of its own" if program.startswith(("/tmp/", "/var/tmp/")) else ""
            raise ConfigError(f"{text}{own}", path="notify.command")
    if notify.webhook and notify.webhook_file:
        raise ConfigError("is given, and webhook_file too: give one", path="notify.webhook")
    if notify.token_file and not (notify.webhook or notify.webhook_file):
        raise ConfigError("is given without webhook or webhook_file", path="notify.token_file")
    if notify.webhook:
        check_url(notify.webhook, "notify.webhook")
    if notify.webhook_file:
        check_url(read_secret(notify.webhook_file, "notify.webhook_file"), "notify.webhook_file")
    if notify.token_file:
        read_secret(notify.token_file, "notify.token_file")
    if not 0 < notify.timeout_s <= MOST_TIMEOUT_S:
        raise ConfigError(
            f"is {notify.timeout_s:g}; it must be more than 0 and at most {MOST_TIMEOUT_S:g}", path="notify.timeout_s"
        )
    return notify


def check_url(url: str, path: str) -> None:
    """Raise ConfigError if *url* cannot be posted to. The error does not show the URL: it may be a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or _UNPRINTED.search(url):
        raise ConfigError("has no URL of the form https://HOST/PATH or http://HOST/PATH", path=path)
    if parts.username or parts.password:
        raise ConfigError("has a password in its URL: use token_file, or webhook_file for the whole URL", path=path)


def read_secret(file: str, path: str) -> str:
    """Return the text in *file*, without white space around it. *path* is the key that names the file, for errors.

    Raises:
        ConfigError: it cannot be read, other users can read or change it, or it has more than one line.
    """
    where = f"{path}: {file}"
    try:
        with config_files.open_regular(file) as opened:
            info = os.fstat(opened.fileno())
            text = opened.read(MAX_SECRET + 2).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}", path=where
        ) from None
    if info.st_uid not in (os.geteuid(), 0) or info.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        mode = f"mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid}"
        raise ConfigError(f"has a secret, and other users can read or change it ({mode}): chmod 600", path=where)
    if not text or len(text) > MAX_SECRET or _UNPRINTED.search(text):
        raise ConfigError(f"must have one word of at most {MAX_SECRET} characters", path=where)
    return text


def read(file: str | None) -> Notify:
    """Return the table [notify] of the configuration of `rlinf-actors head`. None is for DEFAULT_FILE, which need not
    exist.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value cannot be used.
    """
    path = Path(file) if file is not None else DEFAULT_FILE
    if file is None and not path.exists():
        return Notify()
    found: Mapping[str, Any] = parse_toml(config_files.read_text(path), str(path))
    return checked(convert(found, _HeadToml, f"{path}: ").notify)
