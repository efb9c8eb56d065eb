"""The package-index settings of this machine, for builds of environments. Reads pip's and uv's configuration files.

pip reads its settings itself, but looks for the file of its interpreter's directory in the new environment. So that
file is named by PIP_CONFIG_FILE. uv does not know pip's settings: if it has none of its own, it gets pip's as options.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import os
from collections.abc import Mapping

import msgspec

from rlinf_actors.config_files import read_text
from rlinf_actors.errors import ConfigError

UV_VARIABLES = (
    "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_NO_INDEX", "UV_FIND_LINKS",
    "UV_CONFIG_FILE", "UV_OFFLINE",
)  # fmt: skip
_KEYS = ("index-url", "extra-index-url", "no-index", "find-links", "trusted-host", "cert")


class IndexSettings(msgspec.Struct, frozen=True):
    """Where packages come from on this machine.

    Attributes:
        pip: pip's settings of indexes, by the names of pip's options.
        site_file: the file of pip's settings in the base interpreter's directory, "" if there is none.
        uv_files: the files of uv's settings.
        fingerprint: hash of all settings.
    """

    pip: Mapping[str, str] = msgspec.field(default_factory=dict)
    site_file: str = ""
    uv_files: tuple[str, ...] = ()
    fingerprint: str = ""

    def for_pip(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables with which pip in the new environment has the settings of the base interpreter."""
        if not self.site_file or environ.get("PIP_CONFIG_FILE"):
            return {}
        return {"PIP_CONFIG_FILE": self.site_file}

    def for_uv(self, environ: Mapping[str, str]) -> list[str]:
        """Return options with which uv uses pip's indexes; [] if uv has settings of its own."""
        if self.uv_files or any(environ.get(name) for name in UV_VARIABLES):
            return []
        options = []
        if self.pip.get("index-url"):
            options += ["--index-url", self.pip["index-url"]]
        for name, option in (
            ("extra-index-url", "--extra-index-url"), ("find-links", "--find-links"),
            ("trusted-host", "--allow-insecure-host"),
        ):  # fmt: skip
            for value in self.pip.get(name, "").split():
                options += [option, value]
        if self.pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            options.append("--no-index")
        if self.pip.get("extra-index-url"):
            options += ["--index-strategy", "unsafe-best-match"]  # as pip does: the best version of all indexes
        return options


def read(environ: Mapping[str, str], prefix: str) -> IndexSettings:
    """Return the settings of this machine, as a process with the environment *environ* sees them.

    *prefix* is sys.prefix of the interpreter whose own settings count. A file that cannot be read counts as empty.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    system = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    site_file = os.path.join(prefix, "pip.conf")
    files = [
        *(os.path.join(place, "pip", "pip.conf") for place in system), "/etc/pip.conf",
        os.path.join(home, ".pip", "pip.conf"), os.path.join(config, "pip", "pip.conf"), site_file,
    ]  # fmt: skip
    if environ.get("PIP_CONFIG_FILE"):
        files.append(environ["PIP_CONFIG_FILE"])
    uv_files = [os.path.join(config, "uv", "uv.toml"), "/etc/uv/uv.toml"]
    found: dict[str, str] = {}
    digest = hashlib.sha256()
    for path in files:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(ConfigError, configparser.Error):
            text = read_text(path)
            digest.update(text.encode())
            parser.read_string(text)
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update({key: value for key, value in parser.items(section) if key in _KEYS})
    for key in _KEYS:
        value = environ.get(f"PIP_{key.upper().replace('-', '_')}")
        if value:
            found[key] = value
    for path in uv_files:
        with contextlib.suppress(ConfigError):
            digest.update(read_text(path).encode())
    said = sorted((name, value) for name, value in environ.items() if name.startswith(("PIP_", "UV_")))
    digest.update(repr((said, sorted(found.items()))).encode())
    present = tuple(path for path in uv_files if os.path.exists(path))
    return IndexSettings(found, site_file if os.path.exists(site_file) else "", present, digest.hexdigest())
