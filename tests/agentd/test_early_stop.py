"""A SIGTERM during agentd's setup, in the same turn of the loop as the probe's end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pace
import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
import os, signal, sys
from agentd import command_line as cli, daemon

set_up = daemon.Daemon._start_head

def stopped_meanwhile(self, *arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return set_up(self, *arguments)

daemon.Daemon._start_head = stopped_meanwhile
sys.exit(cli.main())
"""


def test_sigterm_during_setup_is_not_lost():
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ad-") as place, os.fdopen(read) as said:
        Path(place, "hw.json").write_text("{}")
        Path(place, "agentd.toml").write_text("")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF", "NOTIFY"))}
        command = [
            sys.executable, "-c", SOURCE, "--config", f"{place}/agentd.toml", "--head", "--listen", "127.0.0.1:0",
            "--run-dir", f"{place}/run", "--hardware", f"{place}/hw.json", "--ready-fd", str(write),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, env={**env, "PYTHONPATH": str(ROOT)}, pass_fds=(write,), capture_output=True, check=False,
                timeout=pace.PATIENCE_S,
            )  # fmt: skip
        finally:
            os.close(write)
        assert done.returncode == 0, done.stderr
        assert "head" not in said.read()  # agentd never reported that it was ready
