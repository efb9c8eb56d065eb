"""What counts as another installation, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf_actors import installed
from rlinf_actors.installed import Looks, fingerprint


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """site-packages with numpy, and with an editable installation of this package."""
    made = tmp_path / "lib" / "site-packages"
    (made / "numpy-1.26.0.dist-info").mkdir(parents=True)
    (made / "numpy").mkdir()
    sources = tmp_path / "src" / "rlinf_actors" / "worker"
    sources.mkdir(parents=True)
    (sources / "template.py").write_text("one")
    (made / "_rlinf_actors.pth").write_text(f"{tmp_path}/src\n")
    return made


def upgrade(site: Path) -> None:
    (site / "numpy-1.26.0.dist-info").rename(site / "numpy-2.0.0.dist-info")


def install_again(site: Path) -> None:
    (site / "numpy-1.26.0.dist-info").rmdir()
    (site / "numpy-1.26.0.dist-info").mkdir()
    os.utime(site / "numpy-1.26.0.dist-info", ns=(1, 1))


def install_more(site: Path) -> None:
    (site / "torch-2.1.0.dist-info").mkdir()


def edit(site: Path) -> None:
    file = site.parents[1] / "src" / "rlinf_actors" / "worker" / "template.py"
    file.write_text("two")
    os.utime(file, ns=(1, 1))


def lead_elsewhere(site: Path) -> None:
    (site / "_rlinf_actors.pth").write_text("/nowhere\n")
    os.utime(site / "_rlinf_actors.pth", ns=(1, 1))


@pytest.mark.parametrize("change", [upgrade, install_again, install_more, edit, lead_elsewhere])
def test_other_code_has_another_fingerprint(site, change):
    before = fingerprint([str(site)])
    assert fingerprint([str(site)]) == before
    change(site)
    assert fingerprint([str(site)]) != before


def test_each_source_is_looked_at_once_although_two_places_lead_to_it(site, tmp_path, monkeypatch):
    """The run directory of an agentd has a link to the package that it runs."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "rlinf_actors").symlink_to(tmp_path / "src" / "rlinf_actors")
    looked: list[str] = []
    changed = installed._changed
    monkeypatch.setattr(installed, "_changed", lambda path: looked.append(path) or changed(path))
    places = [str(site), str(tmp_path / "pkg")]
    before = fingerprint(places)
    assert [path for path in looked if path.endswith(".py")] == [f"{tmp_path}/src/rlinf_actors/worker/template.py"]
    edit(site)
    assert fingerprint(places) != before


def test_a_fifo_in_a_users_packages_does_not_stop_agentd(site):
    """agentd looks at the packages of other users before launches, on its loop."""
    os.mkfifo(site / "evil.pth")
    assert fingerprint([str(site)])


def test_what_running_it_leaves_changes_nothing(site):
    before = fingerprint([str(site)])
    for directory in (site, site / "numpy", site.parents[1] / "src" / "rlinf_actors"):
        (directory / "__pycache__").mkdir()
        (directory / "__pycache__" / "a.pyc").write_text("")
    assert fingerprint([str(site)]) == before


def test_modules_on_pythonpath_count_where_the_template_imports_them(tmp_path):
    (tmp_path / "mine.py").write_text("one")
    (tmp_path / "other.py").write_text("one")
    before, without = fingerprint([str(tmp_path)], ["mine.part"]), fingerprint([str(tmp_path)])
    for name in ("mine.py", "other.py"):
        os.utime(tmp_path / name, ns=(1, 1))
    assert fingerprint([str(tmp_path)], ["mine.part"]) != before
    assert fingerprint([str(tmp_path)]) == without


def test_the_package_behind_a_link_is_looked_at(site, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rlinf_actors").symlink_to(tmp_path / "src" / "rlinf_actors")
    before = fingerprint([str(tmp_path / "run")])
    edit(site)
    assert fingerprint([str(tmp_path / "run")]) != before


def test_paths_that_are_no_directories_are_empty():
    assert fingerprint(["", "/nowhere", "/usr/lib/python311.zip"]) == fingerprint(
        ["", "/nowhere", "/usr/lib/python311.zip"]
    )


def test_work_is_bounded_for_all_paths_together(tmp_path: Path) -> None:
    """A user's template says where its code is: in directories that the user has filled."""
    for name in ("a", "b"):
        inner = tmp_path / name / "rlinf_actors"
        for _ in range(3):
            inner = inner / "deep"
            inner.mkdir(parents=True)
            for number in range(20):
                (inner / f"{number}.py").touch()
    looks = Looks(30)
    fingerprint([str(tmp_path / "a"), str(tmp_path / "b")], (), looks)
    assert looks.left == 0
