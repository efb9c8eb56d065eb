"""On another operating system the package imports, and says what it needs. Modules that only Unix has are absent."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = {
    "darwin": [],
    "win32": ["fcntl", "grp", "pwd", "resource", "termios", "_posixsubprocess", "syslog"],
}
SAID = {
    "darwin": "needs Linux, and this is macOS: run it in a container or virtual machine, or on a Linux machine by ssh",
    "win32": "needs Linux, and this is Windows: run it in WSL 2 (wsl --install), or on a Linux machine by ssh",
}


def run(platform: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run *code* where the interpreter says that it is on *platform*, after what Python itself imports."""
    there = f"import sys, os, pathlib, pytest_asyncio; sys.platform = {platform!r}\n"
    there += f"sys.modules.update(dict.fromkeys({MISSING[platform]}))\n"
    return subprocess.run([sys.executable, "-c", there + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("platform", SAID)
def test_the_package_imports_and_its_names_say_what_they_need(platform):
    done = run(platform, "import rlinf_actors; print(rlinf_actors.__version__); from rlinf_actors import Cluster")
    assert done.stdout.strip()
    assert done.stderr.splitlines()[-1] == f"ImportError: rlinf_actors.Cluster {SAID[platform]}"


@pytest.mark.parametrize("platform", SAID)
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("rlinf-actors", "from rlinf_actors.cli.main import main; sys.exit(main(['status']))"),
        ("rlinf-actors", "from rlinf_actors.cli.main import main; sys.exit(main(['estop']))"),
        ("agentd", "import runpy; runpy.run_module('agentd', run_name='__main__')"),
        ("python -m rlinf_actors.dropin", "import runpy; runpy.run_module('rlinf_actors.dropin', run_name='__main__')"),
    ],
)
def test_programs_end_with_a_message(platform, program, code):
    done = run(platform, code)
    assert (done.returncode, done.stderr) == (69, f"error: {program} {SAID[platform]}\n")


@pytest.mark.parametrize("platform", SAID)
def test_pytest_runs_beside_the_plugin(platform):
    done = run(platform, "import rlinf_actors.testing.pytest_plugin; print('imported')")
    assert (done.stdout, done.stderr) == ("imported\n", "")
