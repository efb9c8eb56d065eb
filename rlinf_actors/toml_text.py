"""Parses the TOML of configuration files within the bounds of config_files. Any thread.

Apart from config_files, which modules without asyncio use: compat imports it, and this import takes 10 ms.
"""

from __future__ import annotations

import re
from typing import Any

from rlinf_actors.compat import tomllib
from rlinf_actors.config_files import MAX_DEPTH
from rlinf_actors.errors import ConfigError

_STRING = re.compile(r""""(?:[^"\\]|\\.)*(?:"|\\?$)|'[^']*(?:'|$)|#.*""")
"""A string or comment of a line. A string without an end takes the rest of the line, so nothing is read twice."""


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """Return the values in *text*, the content of the TOML file *path*. Raises ConfigError if it is not TOML."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DEPTH and _STRING.sub("", line).count(".") > MAX_DEPTH:
            raise ConfigError(f"line {number} has a key of more than {MAX_DEPTH} parts", path=path)
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except ValueError as error:  # a number may have too many digits for int()
        raise ConfigError(f"is not TOML: {error}", path=path) from None
    except RecursionError:
        raise ConfigError(f"is nested too deeply: at most {MAX_DEPTH} levels", path=path) from None
    return values
