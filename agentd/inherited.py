"""What workers get of the environment that agentd was started with. Pure, but for the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rlinf_actors.settings import FOR_THE_UNIT_ALONE

log = logging.getLogger(__name__)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """All of it, but what is for agentd's unit alone, and what is no UTF-8: no message carries that.

    The latter are said in the log, since a user's program may look for them.
    """
    kept = {name: value for name, value in environ.items() if name not in FOR_THE_UNIT_ALONE}
    for name in [name for name, value in kept.items() if not _is_utf8(name + value)]:
        log.warning("workers do not get the environment variable %s: it is not UTF-8", ascii(name))
        del kept[name]
    return kept


def _is_utf8(text: str) -> bool:
    """Bytes that are not are lone surrogates in a text of os.environ (os.fsdecode)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
