"""How a worker's own log writes its lines: as text, or as JSON with the worker's group, rank, node and job.

Only the handler of `Worker.log_info` and its siblings uses it. Handlers that a program has installed have their own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping

TEXT = "[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
KEYS = ("time", "level", "group", "rank", "node", "job", "logger", "message", "exception")
"""The keys of a line in JSON, in their order. `time` is in seconds since the epoch; `exception` is a traceback."""


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON with KEYS.

    Args:
        origin: returns `group`, `rank`, `node` and `job` of this process.
    """

    def __init__(self, origin: Callable[[], Mapping[str, object]]) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """Return *record* as a line of JSON."""
        exception = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else "")
        if record.stack_info:
            exception = "\n".join(filter(None, [exception, self.formatStack(record.stack_info)]))
        found = {
            "time": record.created,
            "level": record.levelname,
            **self._origin(),
            "logger": record.name,
            "message": record.getMessage(),
            "exception": exception or None,
        }
        return json.dumps(found, ensure_ascii=False)


def parsed(line: str) -> dict[str, object] | None:
    """Return what JsonFormatter has written as *line*, None for another line."""
    if not line.startswith(f'{{"{KEYS[0]}"'):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and tuple(found) == KEYS else None
