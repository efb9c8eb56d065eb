"""Runs agentd: ``python -m agentd``."""

from __future__ import annotations

import gc

from rlinf_actors.platforms import end_elsewhere

end_elsewhere("agentd")
gc.disable()  # until the daemon serves: imports leave little garbage

from agentd.command_line import run  # noqa: E402

if __name__ == "__main__":
    run()
