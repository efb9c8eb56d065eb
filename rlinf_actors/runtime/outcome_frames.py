"""Which frames of a Future the traceback of its error must not keep."""

from __future__ import annotations


def leave_out_outcome(error: BaseException) -> None:
    """Remove the frames of `Future._outcome`, which has raised *error* to the caller, from the traceback.

    They refer to the Future, and the Future to the error: only the garbage collector would free them, and all else that
    the Future holds, such as large results of other ranks.
    """
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None and trace.tb_frame.f_code.co_name == "_outcome":
        trace = trace.tb_next
    error.__traceback__ = trace
