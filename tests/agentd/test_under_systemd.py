"""The shipped units under a real systemd: workers go on when agentd is killed or hands over, and end when it stops."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import systemd_box

from rlinf_actors.cli import app
from rlinf_actors.systemd import units

WHY_NOT = systemd_box.unusable()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

ALL = (units.HEAD, units.AGENTD, units.HARDENED)
HERE = Path(__file__).resolve().parent
AGENT = "rlinf-agentd@root"
PROGRAMS = {"@AGENTD@": f"{sys.executable} -m agentd", "@RLINF_ACTORS@": f"{sys.executable} -m rlinf_actors.cli.main"}


@pytest.fixture
def keys(tmp_path, monkeypatch, capsys):
    """The key directory of the machine; gives `rlinf-actors keys` for it."""
    monkeypatch.setenv("RLINF_ACTORS_KEYS", str(tmp_path / "keys"))

    def command(*arguments: str) -> str:
        code = app.run(["keys", *arguments])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out.strip()

    command("init")
    return command


@pytest.fixture
def box(tmp_path, keys, request):  # docs/operations.md, "Install", in short
    alone = "[Unit]\nDefaultDependencies=no\n[Service]\nRestartSec=100ms\nEnvironment=PYTHONDONTWRITEBYTECODE=1\n"
    paths = f"{alone}Environment=PYTHONPATH={HERE.parents[1]}\n"
    files = {
        name: units.text(name, PROGRAMS).replace("/etc/rlinf-actors/keys", f"{tmp_path}/keys") for name in units.UNITS
    }
    # a checkout may be below /tmp or /root, and there is no user rlinf-head
    head = "User=root\nPrivateTmp=no\nProtectSystem=full\nEnvironment=RLINF_ACTORS_LISTEN=127.0.0.1:0\n"
    files[f"{units.HEAD}.d/test.conf"] = paths + head
    watchdog = f"WatchdogSec={request.config.option.watchdog_seconds or 60}\n"
    files[f"{units.AGENTD}.d/test.conf"] = f"{paths}{watchdog}Environment=RLINF_ACTORS_CONFIG={tmp_path}/agentd.toml\n"
    files["network-online.target"] = ""  # masked: nothing of a whole machine is started
    with systemd_box.box(files, request.config.option.systemd) as started:
        yield started


@pytest.mark.timeout(120)  # a whole systemd, and two restarts of a daemon
def test_a_life(box, tmp_path, keys, request):
    box.ctl("start", "rlinf-head")
    address = box.ctl("show", "-P", "StatusText", "rlinf-head").removeprefix("listens on ")
    (tmp_path / "hw.json").write_text("{}")
    (tmp_path / "agentd.toml").write_text(
        f'[head]\nconnect = "{address}"\n[hardware]\ndescribed = "{tmp_path}/hw.json"\n'
    )
    keys("join", keys("enroll", "n1", "--head", address))
    box.ctl("start", AGENT)
    assert box.ctl("show", "-P", "StatusText", AGENT) == f"registered; head: tcp://{address}; no accelerators or robots"
    driver = box.popen(
        sys.executable, str(HERE / "under_systemd_driver.py"), RLINF_HEAD=address, RLINF_ACTORS_KEYS=f"{tmp_path}/keys"
    )

    def ask():
        driver.stdin.write("\n")
        driver.stdin.flush()
        return json.loads(driver.stdout.readline())

    first, _ = ask()
    assert (first["no_new_privileges"], first["told"]) == ("1", [])
    version = int(box.ctl("show", "-P", "Version").split()[0].partition(".")[0])
    # an earlier one does not tell a service that its cgroup is delegated
    assert (f"/{AGENT}.service/rlinf-actors/" in first["cgroup"]) is (version >= 251), "a worker has its own"
    main_only = "--kill-whom=main" if version >= 252 else "--kill-who=main"
    main = box.ctl("show", "-P", "MainPID", AGENT)
    for number in ("KILL", "USR1", "STOP") if request.config.option.watchdog_seconds else ("KILL", "USR1"):
        box.ctl("kill", "-s", number, main_only, AGENT)
        again, another = ask()
        assert again == first
        assert another["pid"] != first["pid"]
        assert box.ctl("show", "-P", "MainPID", AGENT) not in (main, "0")
        main = box.ctl("show", "-P", "MainPID", AGENT)
    box.ctl("reload", AGENT)
    assert box.ctl("is-active", AGENT) == "active"
    assert box.processes(f"{AGENT}.service")
    box.ctl("stop", AGENT)
    assert box.processes(f"{AGENT}.service") == []
    assert not os.path.exists(f"/proc/{driver.pid}/root/run/rlinf-agentd/root")
    driver.kill()
    driver.communicate()
    box.ctl("stop", "rlinf-head")
