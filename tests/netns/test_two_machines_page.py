"""docs/tutorial/two-machines.md, followed as it is written: six lines from nothing to two machines with keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pytest
from page_machine import Machine

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


def test_six_lines_lead_from_nothing_to_two_machines():
    before = STEPS[: [command.endswith(SCRIPT) for _, command in STEPS].index(True)]
    assert sum(2 if machine == "both machines" else 1 for machine, _ in before) == 6
    made, *rest = [line for _, line in before]
    assert made.startswith("python3 -m venv .venv && .venv/bin/pip install "), "needs no clone, and no other directory"
    assert all(line.startswith(".venv/bin/") and "&&" not in line for line in rest), "each is one command"
    assert "you type six lines" in PAGE
    assert "four commands of steps 2 to 4" in PAGE
    assert len(rest) == 4


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
                machine.kill()


def test_the_page_leads_to_a_script_on_two_machines(machines, place):
    place.joinpath("first", SCRIPT).write_text(re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1])
    token, outputs = "", {}
    for name, command in STEPS:
        if name == "both machines":
            continue  # README.md's first command installs a clone, and CI runs that
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
