"""A driver for `cases.deaths` to kill: ``python -m benchmarks.victim BACKEND WORKERS``."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from benchmarks.backends import load_backend


def main() -> None:
    """Start workers, each with a child process. Print the pids of the children, then wait."""
    runtime: Any = load_backend(sys.argv[1])
    runtime.start()
    print(json.dumps(runtime.spawn(int(sys.argv[2])).call("start_child")), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
