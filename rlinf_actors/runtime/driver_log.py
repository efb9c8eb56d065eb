"""The log of this library in a driver, at the level of RLINF_LOG_LEVEL."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from rlinf_actors.settings import LOG_LEVEL, log_level

FORMAT = "[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"


def set_up(environ: Mapping[str, str]) -> None:
    """If RLINF_LOG_LEVEL is set, show the library's log messages of that level and above.

    They go to the handlers that the program has installed, or to stderr if it has none. Without the variable nothing
    changes: Python shows warnings and errors.

    Raises:
        ConfigError: the level is not known.
    """
    if not environ.get(LOG_LEVEL):
        return
    library = logging.getLogger("rlinf_actors")
    library.setLevel(log_level(environ))
    if not library.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        library.addHandler(handler)
