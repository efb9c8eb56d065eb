"""docs/tutorial/two-machines.md, followed as it is written: six commands from nothing to two machines with keys."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pace
import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

PAGE = (netns_kit.PROJECT / "docs/tutorial/two-machines.md").read_text()
STEP = re.compile(
    r"^## \d\. On (both machines|the first machine|the second machine): .*\n((?:(?!^## ).*\n)*)", re.MULTILINE
)
STEPS = [
    (machine, command)
    for machine, text in STEP.findall(re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL))
    for command in re.findall(r"^    (.+)$", text, re.MULTILINE)
]
"""The commands in their order, with the machine of each."""
SCRIPT = "both.py"


def test_six_commands_lead_to_two_machines():
    before = STEPS[: [command.endswith(SCRIPT) for _, command in STEPS].index(True)]
    assert sum(2 if machine == "both machines" else 1 for machine, _ in before) == 6


class Machine:
    """A host with a home directory of its own, in which the project is installed, as after the first step."""

    def __init__(self, host: netns_kit.Host, home: Path) -> None:
        self._host, self._home = host, home
        self.daemons: list[subprocess.Popen[str]] = []
        for name in ("run", "heads"):
            home.joinpath(name).mkdir(mode=0o700, parents=True)
        home.joinpath(".venv").symlink_to(sys.prefix)

    def start(self, command: str) -> subprocess.Popen[str]:
        # what is a machine's own
        own = {"HOME": "", "XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "RLINF_ACTORS_HEADS": "heads"}
        return subprocess.Popen(
            self._host.command(["env", *shlex.split(command)]), cwd=self._home,
            env={"PATH": os.environ["PATH"], **{name: str(self._home / place) for name, place in own.items()}},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, command: str) -> tuple[str, str]:
        with self.start(command) as process:
            out, err = process.communicate(timeout=pace.PATIENCE_S)
        assert process.returncode == 0, f"{command}: {err}"
        return out, err

    def run_daemon(self, command: str) -> None:
        """Return when the node is registered, as its terminal says."""
        self.daemons.append(self.start(command))
        said = ""
        while " is registered" not in said:
            line = self.daemons[-1].stderr.readline()
            assert line, f"{command}: {said}"
            said += line

    def interrupt(self) -> None:
        """Press Ctrl-C in the terminals of the daemons."""
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGINT)
            with daemon:
                daemon.communicate(timeout=pace.PATIENCE_S)
            assert daemon.returncode == 0


@pytest.fixture
def machines(place: Path) -> Iterator[dict[str, Machine]]:
    with netns_kit.wired([{"eth0": ("br0", [f"10.0.0.{n}/24"])} for n in (1, 2)]) as hosts:
        made = {
            f"the {name} machine": Machine(host, place / name)
            for name, host in zip(("first", "second"), hosts, strict=True)
        }
        try:
            yield made
        finally:
            for machine in made.values():
                for daemon in machine.daemons:
                    if daemon.poll() is None:
                        daemon.kill()
                        daemon.communicate()


def test_the_page_leads_to_a_script_on_two_machines(machines, place):
    place.joinpath("first", SCRIPT).write_text(re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1])
    token, outputs = "", {}
    for name, command in STEPS:
        if name == "both machines":
            continue  # README.md's first command installs it in the same way, and CI runs that
        if " agentd " in f" {command.replace('.venv/bin/', '')} ":
            machines[name].run_daemon(command.replace("TOKEN", token))
            continue
        outputs[command], err = machines[name].run(command)
        if " keys enroll " in command:
            assert err.count("using the head") == 1
            token = outputs[command].split()[-1]
            (joining,) = [line for _, line in STEPS if line.endswith(" TOKEN")]
            assert joining.removeprefix(".venv/bin/").replace("TOKEN", token) in err
    shown = re.search(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)[1]
    assert outputs[f"RLINF_HEAD=10.0.0.1:6380 .venv/bin/python {SCRIPT}"] == shown
    assert re.findall(r"10\.0\.0\.\d", outputs[".venv/bin/rlinf-actors nodes"]) == ["10.0.0.1", "10.0.0.2"]
    for machine in reversed(machines.values()):
        machine.interrupt()
