"""Runs agentd: ``python -m agentd``."""

from __future__ import annotations

import gc

gc.disable()  # until the daemon serves: imports leave little garbage

from agentd.command_line import run  # noqa: E402

if __name__ == "__main__":
    run()
