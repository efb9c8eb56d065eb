"""`closed_process.py ARGUMENT...`: run the interpreter with these arguments as a child, and try to reach into it.

The child is a daemon that prints a line when it runs. Prints, in JSON, what each attempt led to, and whether a crash of
the daemon left a core file.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys


def tried(path: str) -> str:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return type(error).__name__
    return "open"


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline(), "it has ended"
        names = ("mem", "environ", "maps", "fd")
        found: dict[str, object] = {name: tried(f"/proc/{daemon.pid}/{name}") for name in names}
        found["own"] = tried("/proc/self/mem")
        daemon.send_signal(signal.SIGABRT)
        _, status = os.waitpid(daemon.pid, 0)
        daemon.returncode = 0
        found["signal"], found["core"] = os.WTERMSIG(status), os.WCOREDUMP(status)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
