"""Which frames the traceback of an error must not keep."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


def leave_out_outcome(error: BaseException) -> None:
    """Remove the frames of `Future._outcome`, which has raised *error* to the caller, from the traceback.

    They refer to the Future, and the Future to the error: only the garbage collector would free them, and all else that
    the Future holds, such as large results of other ranks.
    """
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None and trace.tb_frame.f_code.co_name == "_outcome":
        trace = trace.tb_next
    error.__traceback__ = trace


def forget_error() -> None:
    """If the running task ends cancelled, make it forget its error.

    Until a caller awaits the task, it keeps the error, and so the frames of its coroutines with all their variables,
    such as the handle of a group.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                task.result()

    if asyncio._get_running_loop() is not None and (task := asyncio.current_task()) is not None:
        task.add_done_callback(ended)
