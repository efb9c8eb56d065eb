"""The tables of rlinf_actors.dropin have every name of a checkout of RLinf."""

from __future__ import annotations

from pathlib import Path

import checkout as co
import pytest

import rlinf_actors
from rlinf_actors.dropin.class_members import MEMBERS
from rlinf_actors.dropin.finder import names_of
from rlinf_actors.dropin.table import CHECKOUT, MODULES, PACKAGES

pytestmark = co.NEEDS_SOURCE

NOT_NAMES = {"ClsType", "WorkerClsType", "ManagerClsType", "logger", "ray_version"}
"""Type variables, loggers and constants of Ray."""


def served() -> list[Path]:
    """Return the files of rlinf.scheduler without the packages that come from the checkout."""
    files = sorted(co.scheduler().rglob("*.py"))
    return [path for path in files if co.module_name(path).partition(".")[0] not in CHECKOUT]


def test_the_table_has_every_module():
    assert {co.module_name(path) for path in served()} == {*MODULES, *PACKAGES}


def test_the_table_has_every_public_name():
    for path in served():
        module = co.module_name(path)
        if module in MODULES:
            public = {name for name in co.defined(path) if not name.startswith("_")} - NOT_NAMES
            assert public <= names_of(module).keys(), module
        else:
            assert set(co.exported(path)) <= names_of(module).keys(), module


def test_rlinf_actors_exports_what_rlinf_scheduler_exports():
    missing = set(co.exported(co.scheduler() / "__init__.py")) - set(rlinf_actors.__all__)
    assert not missing


@pytest.mark.parametrize("cls", co.CLASSES)
def test_members_that_a_class_lacks_are_in_the_table(cls):
    assert MEMBERS.get(cls, {}).keys() == co.lacking(cls), "run python -m tests.rlinf.write_members"
