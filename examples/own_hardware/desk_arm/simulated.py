"""A simulated arm: a process at the other end of a pseudo-terminal.

The process prints the device's path, and ends when its standard input is closed.
"""

from __future__ import annotations

import os
import select
import sys
import tty

SERIAL = "DESK-0042"


def main() -> None:
    """Answer commands until standard input is closed."""
    line, device = os.openpty()  # *device* stays open: without a user the line would hang up
    tty.setraw(device)
    print(os.ttyname(device), flush=True)
    angle, received = "0", b""
    while True:
        ready = select.select([line, sys.stdin], [], [])[0]
        if sys.stdin in ready:
            return
        received += os.read(line, 256)
        *commands, received = received.split(b"\n")
        for command in commands:
            name, _, value = command.decode().partition(" ")
            if name == "MOVE":
                angle = value
            os.write(line, (SERIAL if name == "ID" else angle).encode() + b"\n")


if __name__ == "__main__":
    main()
