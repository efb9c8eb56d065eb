"""The arm's protocol: each command is a line, and each answer is a line."""

from __future__ import annotations

import os
import select
import termios
import tty

TIMEOUT_S = 5.0


def ask(port: str, command: str, timeout_s: float = TIMEOUT_S) -> str:
    """Send *command* and return the arm's answer.

    Args:
        port: path of the serial device.
        command: ``ID``, ``POS``, or ``MOVE`` and an angle in degrees.
        timeout_s: seconds that each part of the answer may take.

    Raises:
        OSError: the device does not exist, is not a serial line, or does not answer (TimeoutError).
    """
    line = os.open(port, os.O_RDWR | os.O_NOCTTY)
    try:
        try:
            tty.setraw(line, termios.TCSANOW)
        except termios.error as error:  # not a subclass of OSError
            raise OSError(*error.args) from None
        os.write(line, command.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            if not select.select([line], [], [], timeout_s)[0]:
                raise TimeoutError(f"no answer to {command!r} within {timeout_s:g} s")
            answer += os.read(line, 256)
        return answer.decode().strip()
    finally:
        os.close(line)
