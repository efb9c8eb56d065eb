"""Where a node keeps the code and the environments of its user, and how much. Reads the environment of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from rlinf_actors.codesync.tree import TreeLimits
from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import CodeSettings

CODE = "code"
ENVIRONMENTS = "environments"


class Places(msgspec.Struct, frozen=True):
    """The cache directory of this user on this machine.

    Attributes:
        root: the directory; mode 0700.
        settings: its bounds.
    """

    root: str
    settings: CodeSettings

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Places:
        """Return the places that the environment *environ* names; None for ``os.environ``."""
        env = os.environ if environ is None else environ
        settings = CodeSettings.load(env)
        home = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")
        return cls(settings.cache_dir or os.path.join(home, "rlinf-actors"), settings)

    @property
    def code(self) -> str:
        """Directory of the trees of code."""
        return os.path.join(self.root, CODE)

    @property
    def environments(self) -> str:
        """Directory of the environments."""
        return os.path.join(self.root, ENVIRONMENTS)

    @property
    def limits(self) -> TreeLimits:
        """The largest tree of code that this node accepts."""
        return TreeLimits(self.settings.max_files, self.settings.max_bytes)

    def make(self, directory: str) -> None:
        """Make *directory*, which is `code` or `environments`, private to this user.

        Raise ConfigError if it cannot be made, or if it belongs to another user.
        """
        try:
            for place in (self.root, directory):
                os.makedirs(place, mode=0o700, exist_ok=True)
                found = os.stat(place)
                if found.st_uid != os.getuid():
                    raise ConfigError(
                        f"{place} belongs to user {found.st_uid}, not to user {os.getuid()}, who keeps code and "
                        "environments there: name another directory",
                        path="RLINF_ACTORS_CACHE_DIR",
                    )
                if found.st_mode & 0o022:
                    os.chmod(place, 0o700)
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be made ({error.strerror}): name another directory in the node's environment",
                path="RLINF_ACTORS_CACHE_DIR",
            ) from None
