"""Runs agentd: ``python -m agentd``."""

from __future__ import annotations

import sys

from agentd.command_line import main

if __name__ == "__main__":
    sys.exit(main())
