"""What the driver sends, what it leaves out, and what it says about files that cannot be sent."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from code_kit import snapshot, write

from rlinf_actors.codesync.code_scan import Scanner, matcher
from rlinf_actors.codesync.source import CodeSource
from rlinf_actors.codesync.tree import TreeError, TreeLimits


@pytest.mark.parametrize(
    ("pattern", "path", "is_directory", "expected"),
    [
        ("wandb", "wandb", True, True),
        ("wandb", "a/b/wandb", False, True),
        ("wandb", "wandb2", True, False),
        ("*.ckpt", "a/b.ckpt", False, True),
        ("*.ckpt", "a.ckpt/b", False, False),
        ("data/", "a/data", True, True),
        ("data/", "a/data", False, False),
        ("a/data", "a/data", True, True),
        ("a/data", "b/a/data", True, False),
        ("/data", "data", True, True),
        ("/data", "a/data", True, False),
        ("logs/**/*.txt", "logs/a/b/c.txt", False, True),
        ("logs/**/*.txt", "logs/c.txt", False, True),
        ("logs/*.txt", "logs/a/c.txt", False, False),
        ("f?", "fa", False, True),
        ("a.b", "axb", False, False),
        ("[x]", "[x]", False, True),
    ],
)
def test_patterns_mean_what_the_page_says(pattern, path, is_directory, expected):
    assert matcher([pattern])(path, is_directory) is expected


def test_code_is_found_and_what_is_none_is_left_out(tmp_path):
    write(tmp_path, {
        "train.py": "x", "pkg/mod.py": "y", "pkg/data.yaml": "z", ".git/HEAD": "ref", "pkg/__pycache__/m.pyc": "c",
        "myenv/pyvenv.cfg": "", "myenv/lib/big.py": "b", "conda/conda-meta/h": "", "conda/x": "", "wandb/run": "w",
    })  # fmt: skip
    assert snapshot(tmp_path, excludes=("wandb",)).tree.files.keys() == {"train.py", "pkg/mod.py", "pkg/data.yaml"}


def test_only_the_named_package_is_sent(tmp_path):
    write(tmp_path, {"rlinf/__init__.py": "", "rlinf/a.py": "", "examples/e.py": "", "pyproject.toml": ""})
    assert snapshot(tmp_path, only=("rlinf",)).tree.files.keys() == {"rlinf/__init__.py", "rlinf/a.py"}


def test_executable_files_stay_executable(tmp_path):
    write(tmp_path, {"run.sh": "#!/bin/sh"}).joinpath("run.sh").chmod(0o755)
    assert snapshot(tmp_path).tree.files["run.sh"].executable


def test_large_files_are_named_with_what_to_write(tmp_path):
    write(tmp_path, {"ckpt/model.pt": bytes(2 << 20), "other.bin": bytes((1 << 20) + 1), "small.py": ""})
    with pytest.raises(TreeError) as raised:
        snapshot(tmp_path, file_bytes=1 << 20)
    text = str(raised.value)
    assert "ckpt/model.pt (2.0 MiB), other.bin (1.0 MiB)" in text
    assert "excludes: ['ckpt/']" in text
    assert "max_file_mb: 3" in text
    assert snapshot(tmp_path, file_bytes=1 << 20, excludes=("ckpt/", "*.bin")).tree.files.keys() == {"small.py"}


@pytest.mark.parametrize(
    ("limits", "text"), [(TreeLimits(entries=2), "more than 2 files"), (TreeLimits(size=10), "MiB")]
)
def test_too_much_code_names_the_largest_directories(tmp_path, limits, text):
    write(tmp_path, {"data/a/1": "12345678", "data/a/2": "12345678", "code.py": "c", "more.py": "d"})
    with pytest.raises(TreeError, match=text) as raised:
        Scanner(CodeSource(str(tmp_path)), limits).scan()
    assert "data/a" in str(raised.value)


class TestLinks:
    def test_link_inside_is_sent_as_what_it_leads_to(self, tmp_path):
        write(tmp_path, {"real/a.py": "a", "b.py": "b"})
        (tmp_path / "linked").symlink_to("real")
        (tmp_path / "c.py").symlink_to("b.py")
        files = snapshot(tmp_path).tree.files
        assert files.keys() == {"real/a.py", "linked/a.py", "b.py", "c.py"}
        assert files["c.py"].digest == files["b.py"].digest

    @pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "/etc"])
    def test_link_that_leaves_the_directory_is_refused(self, tmp_path, target):
        write(tmp_path, {"outside": "o", "code/a.py": "a"})
        (tmp_path / "code" / "link").symlink_to(target)
        with pytest.raises(TreeError, match=r"outside: exclude it .*\['link'\]"):
            snapshot(tmp_path / "code")
        assert snapshot(tmp_path / "code", excludes=("link",)).tree.files.keys() == {"a.py"}

    def test_link_to_a_directory_around_it_is_refused(self, tmp_path):
        write(tmp_path, {"a/b.py": "b"})
        (tmp_path / "a" / "loop").symlink_to("..")
        with pytest.raises(TreeError, match="exclude it"):
            snapshot(tmp_path)

    def test_link_to_nothing_is_refused(self, tmp_path):
        (tmp_path / "gone").symlink_to("nowhere")
        with pytest.raises(TreeError, match="link to nothing"):
            snapshot(tmp_path)


def test_sockets_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TreeError, match="neither a file nor a directory"):
        snapshot(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        with pytest.raises(TreeError, match="neither a file nor a directory"):
            snapshot(tmp_path)


def test_name_that_is_not_utf8_is_refused(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).touch()
    with pytest.raises(TreeError, match="not valid UTF-8"):
        snapshot(tmp_path)


def test_second_scan_reads_only_what_has_changed(tmp_path):
    write(tmp_path, {f"f{n}.py": str(n) for n in range(20)})
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    scanner = Scanner(CodeSource(str(tmp_path)))
    scanner.tick_ns = -1  # no file counts as just written
    first = scanner.scan()
    assert scanner.hashed == 20
    assert scanner.scan().tree.root == first.tree.root
    assert scanner.hashed == 0
    write(tmp_path, {"f3.py": "changed"})
    assert scanner.scan().tree.root != first.tree.root
    assert scanner.hashed == 1


def test_file_written_at_the_moment_of_the_scan_is_read_again(tmp_path):
    """A clock of the file system may be too coarse to tell the two writes apart."""
    write(tmp_path, {"a.py": "1"})
    scanner = Scanner(CodeSource(str(tmp_path)))
    scanner.tick_ns = 10**15
    scanner.scan()
    scanner.scan()
    assert scanner.hashed == 1
