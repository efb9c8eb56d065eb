"""The unit files: their options, the verdict of systemd-analyze, and their installation."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pace
import pytest

from rlinf_actors.cli import app
from rlinf_actors.errors import ConfigError
from rlinf_actors.systemd import unit_files

ALL = (*unit_files.UNITS, *unit_files.DROP_INS)
INSTALLED = [*unit_files.UNITS, f"tmpfiles.d/{unit_files.TMPFILES}"]
PROGRAMS = {"@AGENTD@": "/bin/true", "@RLINF_ACTORS@": "/bin/true"}


def service(name: str) -> dict[str, list[str]]:
    """Keys of [Service], each with its values."""
    section, found = "", {}
    for line in unit_files.text(name, PROGRAMS).splitlines():
        if line.startswith("["):
            section = line
        elif "=" in line and not line.startswith("#") and section == "[Service]":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def analyze(tmp_path):
    """Run systemd-analyze on the units, in a directory without other files."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")

    def run(verb: str, name: str, *, hardened: bool = False) -> subprocess.CompletedProcess[str]:
        for one in ALL if hardened else unit_files.UNITS:
            path = tmp_path / one
            path.parent.mkdir(exist_ok=True)
            path.write_text(unit_files.text(one, PROGRAMS))
        command = [tool, "--no-pager", *verb.split(), str(tmp_path / name)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S)

    return run


@pytest.mark.parametrize("name", unit_files.UNITS)
@pytest.mark.parametrize("hardened", [False, True])
def test_systemd_analyze_finds_no_fault(analyze, name, hardened):
    done = analyze("verify", name, hardened=hardened)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "hardened", "most"),
    [
        (unit_files.HEAD, False, 5.2), (unit_files.AGENTD, False, 5.2), (unit_files.AGENTD, True, 3.5),
        (unit_files.WORKERS, False, 5.2), (unit_files.WORKERS, True, 3.5),
        (unit_files.ROOT_AGENTD, False, 6.8), (unit_files.ROOT_WORKERS, False, 6.6),
    ],
)  # fmt: skip
def test_exposure_level_is_bounded(analyze, name, hardened, most):
    done = analyze("security --offline=true", name, hardened=hardened)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= most


def test_units_have_no_option_that_breaks_workers():
    """Workers inherit these options: MemoryDenyWriteExecute breaks CUDA's compiler, DeviceAllow hides devices."""
    forbidden = {
        "MemoryDenyWriteExecute", "PrivateTmp", "PrivateDevices", "PrivateIPC", "PrivateNetwork", "PrivateUsers",
        "ProtectClock", "DevicePolicy", "DeviceAllow", "ProtectHome", "ProtectProc", "ProcSubset", "RestrictRealtime",
        "ProtectControlGroups", "RemoveIPC", "DynamicUser", "DelegateSubgroup",
    }  # fmt: skip
    assert not service(unit_files.AGENTD).keys() & forbidden, (
        "workers run in this unit if the workers' unit does not run"
    )
    said = service(unit_files.WORKERS) | service(unit_files.HARDENED)
    assert not said.keys() & forbidden
    filters = " ".join(said["SystemCallFilter"])
    assert not {"@resources", "@debug", "@ipc", "@memlock"} & set(filters.replace("~", "").split())


def test_agentds_unit_has_the_options_that_keep_workers():
    said = {key: values[-1] for key, values in service(unit_files.AGENTD).items()}
    expected = {
        "Type": "notify", "KillMode": "process", "RuntimeDirectoryPreserve": "restart", "Delegate": "yes",
        "OOMPolicy": "continue", "Restart": "always", "User": "%i", "LimitMEMLOCK": "infinity",
        "OOMScoreAdjust": "-500", "ExecStopPost": "/bin/true --reap",
    }  # fmt: skip
    assert {key: said.get(key) for key in expected} == expected
    assert {"3", "78"} <= set(said["RestartPreventExitStatus"].split()), "3: ended by `rlinf-actors head stop`"
    assert int(said["WatchdogSec"]) > 30
    assert said["RuntimeDirectoryMode"] == "0700"
    assert "list-jobs" in said["ExecStop"], "a restart and a stop differ"
    limits = {name: service(name)["LimitCORE"][-1] for name in unit_files.UNITS}
    assert limits == {unit_files.HEAD: "0"} | dict.fromkeys(unit_files.UNITS[1:], "0:infinity"), "no core files"


def test_workers_unit_has_the_required_options():
    said = {key: values[-1] for key, values in service(unit_files.WORKERS).items()}
    expected = {
        "Type": "notify", "KillMode": "process", "Delegate": "yes", "OOMPolicy": "continue", "Restart": "always",
        "User": "%i", "LimitMEMLOCK": "infinity", "TasksMax": "infinity", "ExecStart": "/bin/true --keeper",
        "RuntimeDirectoryMode": "0700",
    }  # fmt: skip
    assert {key: said.get(key) for key in expected} == expected
    agentd = unit_files.text(unit_files.AGENTD)
    assert f"KEEPER=/run/{said['RuntimeDirectory']}/keeper" in agentd
    assert re.search(r"^Wants=.* rlinf-workers@%i\.service$", agentd, re.M)
    assert "BindsTo" not in agentd
    shared = ("Limit", "Protect", "SystemCall", "Capability", "NoNew", "Private")
    walls = {key: values for key, values in service(unit_files.AGENTD).items() if key.startswith(shared)}
    assert walls.items() <= service(unit_files.WORKERS).items(), "variables that workers got earlier are unchanged"


@pytest.mark.parametrize(
    ("root", "user"), [(unit_files.ROOT_AGENTD, unit_files.AGENTD), (unit_files.ROOT_WORKERS, unit_files.WORKERS)]
)
def test_units_for_several_users_differ_only_in_users_places_and_capabilities(root, user):
    ours, theirs = service(root), service(user)
    assert theirs.pop("User") == ["%i"]
    few = {"CAP_CHOWN", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SYS_PTRACE"}
    assert set(ours.pop("CapabilityBoundingSet")[0].split()) <= few
    theirs.pop("CapabilityBoundingSet")
    assert ours.pop("LogsDirectoryMode", ["0711"]) == ["0711"], "workers of all users pass through it"
    theirs.pop("LogsDirectoryMode", None)
    assert ours == {key: [value.replace("%i", "root") for value in values] for key, values in theirs.items()}


def test_workers_do_not_see_the_credentials_of_their_agentd():
    for name in (unit_files.WORKERS, unit_files.ROOT_WORKERS):
        assert service(name)["InaccessiblePaths"] == ["-/run/credentials"]


def test_unit_files_are_plain_ini_without_placeholders():
    for name in ALL:
        text = unit_files.text(name)
        assert "@AGENTD@" not in text
        assert "@RLINF_ACTORS@" not in text
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        parser.optionxform = str
        parser.read_string(text)
        assert "Service" in parser


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/opt/venv/bin/agentd", "/opt/venv/bin/agentd"),
        ("/opt/my venv/agentd", '"/opt/my venv/agentd"'),
        ("/opt/100%/$x", "/opt/100%%/$$x"),
        ('/o"p', '"/o\\"p"'),
    ],
)
def test_paths_are_escaped_for_systemd(word, expected):
    assert unit_files.escaped(word) == expected


def test_path_with_control_characters_is_refused():
    with pytest.raises(ConfigError, match="control characters"):
        unit_files.escaped("/opt/a\nExecStart=/bin/sh")


# --- the command ---


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = app.run(["units", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_install_lists_written_files_and_next_steps(tmp_path, capsys):
    code, out, err = run(capsys, "install", "--dir", str(tmp_path))
    assert code == 0
    assert out.splitlines() == [f"written: {tmp_path / name}" for name in INSTALLED]
    assert "systemctl daemon-reload" in err
    assert "systemctl enable --now rlinf-agentd@USER" in err
    assert (tmp_path / unit_files.AGENTD).read_text() == unit_files.text(unit_files.AGENTD)
    assert (tmp_path / unit_files.AGENTD).stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*unit_files.UNITS, "tmpfiles.d"])
    code, out, _ = run(capsys, "install", "--dir", str(tmp_path), "--hardened")
    written = [line for line in out.splitlines() if line.startswith("written: ")]
    assert written == [f"written: {tmp_path / name}" for name in unit_files.DROP_INS]
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == ["unchanged"] * 3


def test_install_writes_no_file_if_one_was_changed(tmp_path, capsys):
    changed = tmp_path / unit_files.AGENTD
    changed.write_text(unit_files.text(unit_files.AGENTD) + "Nice=5\n")
    before = changed.read_text()
    code, out, err = run(capsys, "install", "--dir", str(tmp_path))
    assert (code, out) == (78, "")
    assert f"{changed}: was edited, or was not written by rlinf-actors" in err
    assert "systemctl edit rlinf-agentd@.service" in err
    assert changed.read_text() == before
    assert not (tmp_path / unit_files.HEAD).exists()
    code, out, _ = run(capsys, "install", "--dir", str(tmp_path), "--force")
    assert code == 0
    assert f"replaced: {changed}" in out
    assert changed.read_text() == unit_files.text(unit_files.AGENTD)


def test_a_file_of_an_earlier_version_is_replaced(tmp_path, capsys):
    older = unit_files.text(unit_files.HEAD, {"@RLINF_ACTORS@": "/old/bin/rlinf-actors"})
    (tmp_path / unit_files.HEAD).write_text(older)
    assert unit_files.is_ours(older)
    code, out, _ = run(capsys, "install", "--dir", str(tmp_path))
    assert code == 0
    assert f"replaced: {tmp_path / unit_files.HEAD}" in out


def test_install_into_an_unwritable_directory_exits_with_69(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "install", "--dir", str(tmp_path / "file" / "x"))
    assert code == 69
    assert "Not a directory" in err


def test_print_fills_in_this_installation(capsys):
    code, out, _ = run(capsys, "print", unit_files.AGENTD)
    assert (code, out) == (0, unit_files.text(unit_files.AGENTD))
    start = next(line for line in out.splitlines() if line.startswith("ExecStart="))
    program = start.removeprefix("ExecStart=").split()[0]
    assert Path(program).is_file()
    assert run(capsys, "print")[1].count("# --- ") == len(ALL) + 1
    assert run(capsys, "print", "nonsense.service")[0] == 64


def test_uninstall_removes_written_files_and_keeps_changed_ones(tmp_path, capsys):
    run(capsys, "install", "--dir", str(tmp_path), "--hardened")
    changed = tmp_path / unit_files.HARDENED
    changed.write_text(changed.read_text() + "Nice=5\n")
    (tmp_path / "other.service").touch()
    assert run(capsys, "uninstall", "--dir", str(tmp_path))[0] == 64, "it asks, and there is no terminal"
    assert len(list(tmp_path.rglob("rlinf-*.service"))) == len(unit_files.UNITS)
    code, out, err = run(capsys, "uninstall", "--dir", str(tmp_path), "--yes")
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        f"removed: {tmp_path / name}" for name in [*INSTALLED, *unit_files.DROP_INS] if name != unit_files.HARDENED
    )
    assert f"kept, because it was made or changed by hand: {changed}" in err
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["other.service", unit_files.HARDENED]
    assert run(capsys, "uninstall", "--dir", str(tmp_path), "--yes", "--force")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other.service"]


# --- the file for systemd-tmpfiles ---


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("/etc/systemd/system", "/etc/tmpfiles.d/rlinf-actors.conf"),
        ("/run/systemd/system", "/run/tmpfiles.d/rlinf-actors.conf"),
        ("/build/usr/lib/systemd/system", "/build/usr/lib/tmpfiles.d/rlinf-actors.conf"),
        ("/home/me/units", "/home/me/units/tmpfiles.d/rlinf-actors.conf"),
    ],
)
def test_tmpfiles_are_where_systemd_tmpfiles_looks(units, expected):
    assert str(unit_files.place(Path(units), unit_files.TMPFILES)) == expected


def test_directories_of_the_units_are_in_the_tmpfiles():
    said = {line.split()[1] for line in unit_files.text(unit_files.TMPFILES).splitlines() if line.startswith("d ")}
    for name in (unit_files.AGENTD, unit_files.WORKERS):
        keys = service(name)
        made = [f"/run/{keys['RuntimeDirectory'][0]}", *(f"/var/log/{path}" for path in keys.get("LogsDirectory", []))]
        assert {str(Path(path).parent) for path in made} <= said


def test_systemd_tmpfiles_makes_the_directories_and_spares_run_directories(tmp_path):
    tool = shutil.which("systemd-tmpfiles")
    if tool is None:
        pytest.skip("systemd-tmpfiles is not installed")
    file = tmp_path / "etc/tmpfiles.d" / unit_files.TMPFILES
    file.parent.mkdir(parents=True)
    ages = "q /tmp 1777 root root 1s\n"  # as the file of systemd itself, which says 10d
    file.write_text(unit_files.text(unit_files.TMPFILES) + ages)
    old = [tmp_path / "tmp" / name for name in ("rlinf-actors-1000/lock", "rlinf-x/lock", "other/lock")]
    for path in old:
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1, 1))
        os.utime(path.parent, (1, 1))
    # by the times of last changes: nothing can set those of the inodes
    file.write_text(file.read_text().replace(" 1s\n", " m:1s\n"))
    command = [tool, f"--root={tmp_path}", "--create", "--clean", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S)
    if "--root" in done.stderr or "Invalid age" in done.stderr:
        pytest.skip(f"this systemd-tmpfiles is too old: {done.stderr}")
    assert (tmp_path / "var/log/rlinf-agentd").is_dir(), done.stderr
    assert (tmp_path / "run/rlinf-workers").is_dir()
    assert [path.exists() for path in old] == [True, True, False], done.stderr
