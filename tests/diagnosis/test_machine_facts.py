"""Facts about a machine."""

from __future__ import annotations

import os
import sys

from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.diagnosis import machine
from rlinf_actors.diagnosis.machine import Imports, collect, interpreter_of, versions


def test_facts_of_this_machine_are_found() -> None:
    facts = collect(Roots("/cg", why={"memory": "x"}), 3)
    own = facts.interpreters[0]
    assert (own.path, own.own, own.python) == (sys.executable, True, sys.version.split()[0])
    assert own.packages["msgspec"]
    assert facts.open_files[0] <= facts.open_files[1]
    assert (facts.cgroup, facts.cgroup_why, facts.workers) == ("/cg", {"memory": "x"}, 3)
    assert facts.ptrace_scope in range(4)
    assert all(one.ip and 0 < one.prefix <= 32 and one.mtu for one in facts.interfaces)


def test_versions_are_read_from_the_names_of_records(tmp_path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    for name in ("torch-2.9.0+cu128.dist-info", "numpy-2.1.dist-info", "Le_Robot-0.4.dist-info", "junk", "a-b-c"):
        (site / name).mkdir(parents=True)
    os.mkfifo(site / "numpy-2.1.dist-info" / "METADATA")  # of a user: nothing opens it
    found = interpreter_of(Imports("/p", (str(tmp_path), str(site), "/nowhere/site-packages"), ("le_robot.x", "os")))
    assert found.python == "3.12"
    assert found.packages == {
        **dict.fromkeys(machine.PACKAGES, ""), "torch": "2.9.0+cu128", "numpy": "2.1", "le-robot": "0.4"
    }  # fmt: skip


def test_the_first_of_two_installations_counts(tmp_path) -> None:
    for place, version in (("a", "1.0"), ("b", "2.0")):
        (tmp_path / place / "site-packages" / f"numpy-{version}.dist-info").mkdir(parents=True)
    paths = [str(tmp_path / place / "site-packages") for place in "ab"]
    assert versions(paths)["numpy"] == "1.0"
