"""`rlinf-actors units uninstall` under a real systemd: a running, enabled head."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import systemd_box

from rlinf_actors.systemd import unit_files

WHY_NOT = systemd_box.unusable()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
ROOT = str(Path(__file__).resolve().parents[2])
UNITS = "/run/systemd/system"
TMPFILES = "/run/tmpfiles.d/rlinf-actors.conf"
TOOL = (sys.executable, "-m", "rlinf_actors.cli.main", "units", "uninstall", "--dir", UNITS)


def test_uninstall_stops_disables_and_removes_what_install_wrote(tmp_path):
    programs = {"@AGENTD@": f"{sys.executable} -m agentd", "@RLINF_ACTORS@": " ".join((*TOOL[:3],))}
    files = {name: unit_files.text(name, programs) for name in unit_files.UNITS}
    own = "[Unit]\nDefaultDependencies=no\n[Service]\nUser=root\nPrivateTmp=no\nProtectSystem=full\n"
    own += f"Environment=PYTHONPATH={ROOT} RLINF_ACTORS_LISTEN=127.0.0.1:0 RLINF_ACTORS_KEYS={tmp_path}/keys\n"
    own += "LoadCredential=\nSetCredential=\n"
    files[f"{unit_files.HEAD}.d/ours.conf"] = own
    files["network-online.target"] = ""
    with systemd_box.box(files) as box:
        box.ctl("enable", "--runtime", "--now", "rlinf-head")
        assert box.processes(unit_files.HEAD)

        # the units are written by the box, with the commands of this checkout
        install = " ".join((*TOOL[:-3], "install", "--dir", UNITS, "--force"))
        made = "test -d /run/rlinf-agentd && test -d /var/log/rlinf-agentd"
        for step in (install, f"systemd-tmpfiles --create {TMPFILES}", made):
            process = box.popen("sh", "-c", f"cd / && {step}", PYTHONPATH=ROOT)
            out, _ = process.communicate()
            assert process.returncode == 0, out

        def run(*options: str) -> tuple[int, str, str]:
            command = " ".join((*TOOL, *options))
            process = box.popen("sh", "-c", f"cd / && {command} 2>{tmp_path}/err", PYTHONPATH=ROOT)
            out, _ = process.communicate()
            return process.returncode, out, (tmp_path / "err").read_text()

        code, out, err = run()
        assert (code, out) == (64, "")
        assert "stop and disable: rlinf-head.service (running)" in err
        assert "this stops 1 running unit with all workers, and removes " in err
        assert box.processes(unit_files.HEAD), "nothing was done without a confirmation"

        code, out, err = run("--yes")
        assert code == 0, err
        removed = [f"removed: {UNITS}/{name}" for name in unit_files.UNITS]
        removed.append("removed: /run/tmpfiles.d/rlinf-actors.conf")
        assert out.splitlines() == [*removed, f"removed: {UNITS}/multi-user.target.wants/{unit_files.HEAD}"]
        assert f"kept, because it was made or changed by hand: {UNITS}/{unit_files.HEAD}.d/ours.conf" in err
        assert "left, with configuration, keys, state and logs: " in err
        assert "/var/lib/rlinf-head" in err
        assert not box.processes(unit_files.HEAD)
        assert box.ctl("list-units", "--all", "--no-legend", "rlinf-*") == ""

        assert run("--yes")[:2] == (0, "")
