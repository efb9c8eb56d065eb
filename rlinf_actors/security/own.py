"""Which key file is this process's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlinf_actors.errors import ConfigError
from rlinf_actors.security import keyfile
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.publickey import check_public
from rlinf_actors.settings import HEAD_KEY, Settings


def find(
    settings: Settings, *roles: str, given: str | None = None, head: str | None = None, loopback: bool = False
) -> KeyFile | None:
    """The key file of this process; None if it has none.

    Args:
        settings: the environment's.
        roles: what it is, the best first: the file of the first of them that there is (keyfile.locate) is taken.
        given: path of the file, by configuration; it must be there.
        head: public key of the head, by configuration, where the file's own is not to be believed (any more).
        loopback: whether the head listens there, so that a key of a cluster elsewhere (`is_for_elsewhere`) is none.

    Raises:
        ConfigError: the file is not there, is no key file, is of another role, or others can read it.
    """
    path = given or settings.key_file
    if path:
        found = keyfile.load(Path(path))
        if found.role not in roles:
            raise ConfigError(f"is the key of a {found.role}; one of {' or '.join(roles)} is needed here", path=path)
    else:
        there = next(filter(None, (keyfile.locate(settings, role) for role in roles)), None)
        if there is None or (loopback and is_for_elsewhere(there, settings)):
            return None
        found = keyfile.load(there)
    expected = head or settings.head_key
    if expected and found.role != "head":
        check_public(expected, "head_key" if head else HEAD_KEY)
        found = replace(found, head=expected)
    return found


def is_for_elsewhere(path: Path, settings: Settings) -> bool:
    """Whether a key file is of a cluster whose head is not on this machine: it lies in the user's directory, where one
    enrolls once, and no head.key beside it. What somebody names (RLINF_ACTORS_KEYS, a credential) is meant.
    """
    usual = settings.key_dir is None and path.parent == keyfile.directory(settings)
    return usual and not keyfile.path_of(path.parent, "head").exists()
