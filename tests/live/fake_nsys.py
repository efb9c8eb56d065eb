#!/usr/bin/env python3
"""A stand-in for nsys: writes down its arguments, runs the program, passes SIGTERM on, and writes a report at the end.

It closes all descriptors but the standard streams, as a profiler may. FAKE_NSYS=hang: it never ends after its program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


def main() -> int:
    words = sys.argv[1:]
    output = words[words.index("-o") + 1]
    program = words[words.index("-o") + 2 :]
    with open(f"{output}.arguments", "w") as file:
        json.dump(words, file)
    process = subprocess.Popen(program, close_fds=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: process.send_signal(got))
    code = process.wait()
    if os.environ.get("FAKE_NSYS") == "hang":
        while True:
            signal.pause()
    with open(f"{output}.nsys-rep", "w") as file:
        json.dump({"pid": process.pid, "code": code}, file)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
