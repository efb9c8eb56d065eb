"""The log of this library in a driver or a command: its level (RLINF_LOG_LEVEL), and control characters as escapes.

Messages, exceptions and their causes may have texts of workers. The program's own handlers and formatters print them,
so they are made harmless where each log record is made.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rlinf_actors.settings import LOG_LEVEL, log_level
from rlinf_actors.shown import lines

FORMAT = "[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"


def set_up(environ: Mapping[str, str]) -> None:
    """Escape control characters, and if RLINF_LOG_LEVEL is set, show the library's messages of that level and above.

    They go to the handlers that the program has installed, or to stderr if it has none. Without the variable Python
    shows warnings and errors.

    Raises:
        ConfigError: the level is not known.
    """
    make_harmless()
    if not environ.get(LOG_LEVEL):
        return
    library = logging.getLogger("rlinf_actors")
    library.setLevel(log_level(environ))
    if not library.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        library.addHandler(handler)


def make_harmless() -> None:
    """Escape control characters in what this library and asyncio log from now on, and in a traceback that ends the
    process.

    A program's own factory of log records, or its own sys.excepthook, stays.
    """
    if logging.getLogRecordFactory() is logging.LogRecord:
        logging.setLogRecordFactory(_record)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_exception


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return lines(super().getMessage())


def _record(name: str | None, *arguments: Any, **more: Any) -> logging.LogRecord:
    name = name or ""  # logging.makeLogRecord has no name yet
    ours = name.startswith("rlinf_actors.") and name != "rlinf_actors.driver"  # that is the user's: Worker.logger
    if not ours and name != "asyncio":  # which logs the exceptions of tasks
        return logging.LogRecord(name, *arguments, **more)
    record = _Record(name, *arguments, **more)
    if record.exc_info:
        record.exc_text = lines(logging.Formatter().formatException(record.exc_info))
    return record


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that ends the process. The cause of a WorkerError is the worker's own exception."""
    text = "".join(traceback.format_exception(kind, error, trace))
    if lines(text) == text or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(lines(text))
