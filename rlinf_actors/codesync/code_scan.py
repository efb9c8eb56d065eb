"""Read the driver's directory of code: what is sent, the hash of each file, and the tree. Runs on a thread of its own.

A Scanner remembers the hash of each file with the file's size, times and inode, so a second scan reads only files that
have changed since.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from rlinf_actors.codesync.source import CodeSource
from rlinf_actors.codesync.tree import CACHES, FileFacts, Tree, TreeError, TreeLimits, build

DEFAULT_EXCLUDES = (
    ".git", ".hg", ".svn", CACHES, "*.pyc", "*.pyo", ".venv", "venv", ".tox", ".nox", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store", "*.swp", "*.egg-info",
)  # fmt: skip
"""Patterns of files and directories that are never sent."""
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""A directory with one of these entries is a virtual environment, which is never sent."""
_NAMED = 8
"""Most files that an error lists."""
_CHUNK = 1 << 20
TICK_NS = 100_000_000
"""Nanoseconds after which two writes of a file differ in their times, also on coarse clocks of file systems."""


class Found(msgspec.Struct, frozen=True):
    """A file as the scan found it.

    Attributes:
        facts: what the tree records.
        stamp: size, times and inode; another stamp means that the file may have changed.
        settled: False if the file was written so recently that a further write might leave the stamp as it is.
    """

    facts: FileFacts
    stamp: tuple[int, ...]
    settled: bool = True


class CodeSnapshot(msgspec.Struct, frozen=True):
    """The driver's code at one moment.

    Attributes:
        source: where it was read.
        tree: the tree.
        found: each file, by path relative to the root.
    """

    source: CodeSource
    tree: Tree
    found: dict[str, Found]

    def path(self, name: str) -> str:
        """Return the absolute path of the file *name*."""
        return os.path.join(self.source.root, name)


class ChangedError(TreeError):
    """A file of the driver's code has changed since the scan."""


def matcher(patterns: Iterable[str]) -> Callable[[str, bool], bool]:
    """Return a function that says whether a path, relative to the root, is excluded by one of *patterns*.

    A pattern without a slash is for a name at any depth, one with a slash for a path from the root. A slash at the end
    restricts the pattern to directories. ``*`` and ``?`` match within a name, ``**`` any number of directories. The
    function's second argument is True for a directory.
    """
    given = [pattern for pattern in patterns if pattern.strip("/")]
    of_directories = re.compile("|".join(map(_expression, given)) or "(?!)", re.DOTALL)
    of_files = re.compile("|".join(_expression(one) for one in given if not one.endswith("/")) or "(?!)", re.DOTALL)

    def excluded(path: str, is_directory: bool) -> bool:
        return (of_directories if is_directory else of_files).fullmatch(path) is not None

    return excluded


def _expression(pattern: str) -> str:
    body = pattern.rstrip("/")
    anchored = "/" in body
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", body.lstrip("/"))
    table = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = "".join(table.get(part, re.escape(part)) for part in parts)
    return f"(?:{text})" if anchored else f"(?:(?:.*/)?{text})"


class Scanner:
    """Scans one CodeSource again and again. Not thread-safe: one scan at a time.

    Attributes:
        hashed: number of files that the last scan had to read.
        tick_ns: nanoseconds for which a written file does not count as settled.
    """

    def __init__(self, source: CodeSource, limits: TreeLimits | None = None) -> None:
        self._source = source
        self._limits = limits or TreeLimits()
        self._known: dict[str, Found] = {}
        self._excluded = matcher((*DEFAULT_EXCLUDES, *source.excludes))
        self.hashed = 0
        self.tick_ns = TICK_NS

    def scan(self) -> CodeSnapshot:
        """Return the code as it is now. Blocks; reads every changed file.

        Raises:
            TreeError: a file is too large, cannot be read, or must not be sent. The text says what to write.
        """
        root = self._source.root
        found: dict[str, Found] = {}
        large: list[tuple[int, str]] = []
        total = self.hashed = 0
        for path, status in self._files(root, "", frozenset()):
            if status.st_size > self._source.file_bytes:
                large.append((status.st_size, path))
                continue
            total += status.st_size
            if len(found) >= self._limits.entries:
                raise TreeError(self._text(f"has more than {self._limits.entries:,} files", self._largest(found)))
            if total > self._limits.size:
                raise TreeError(self._text(f"has more than {self._limits.size >> 20:,} MiB", self._largest(found)))
            before = self._known.get(path)
            found[path] = before if before and before.stamp == stamp(status) else self._hash(path)
        if large:
            large.sort(reverse=True)
            named = ", ".join(f"{path} ({mib(size)})" for size, path in large[:_NAMED])
            more = f" and {len(large) - _NAMED} more" if len(large) > _NAMED else ""
            raise TreeError(
                f"{root} has files above {mib(self._source.file_bytes)}, which are hardly "
                f"code: {named}{more}. Exclude them (cluster.runtime.excludes: [{_pattern(large[0][1])!r}]), or allow "
                f"them (cluster.runtime.max_file_mb: {(large[0][0] >> 20) + 1})"
            )
        self._known = {path: one for path, one in found.items() if one.settled}
        return CodeSnapshot(self._source, build({path: one.facts for path, one in found.items()}), found)

    def _text(self, fault: str, largest: str) -> str:
        return (
            f"{self._source.root} {fault}, too much to be sent as code; most is in {largest}. "
            "Exclude what is not code (cluster.runtime.excludes), or name a smaller directory"
        )

    @staticmethod
    def _largest(found: dict[str, Found]) -> str:
        sizes: dict[str, int] = {}
        for path, one in found.items():
            top = "/".join(path.split("/")[:2])
            sizes[top] = sizes.get(top, 0) + one.facts.size
        ranked = sorted(sizes, key=lambda top: -sizes[top])[:_NAMED]
        return ", ".join(f"{top} ({mib(sizes[top])})" for top in ranked)

    def _files(self, directory: str, prefix: str, above: frozenset[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield each file to be sent below *directory*, with its path relative to the root.

        Links to places inside the root are followed: the copy has no links. *above* are the real paths of the
        directories around this one.
        """
        real = os.path.realpath(directory)
        if real in above:
            raise TreeError(f"{directory} is a link to a directory around it: exclude it")
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise self._unreadable(directory, error) from None
        if prefix and any(entry.name in ENVIRONMENT_MARKS for entry in entries):
            return
        for entry in entries:
            path = prefix + entry.name
            if not prefix and self._source.only and entry.name not in self._source.only:
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                if not entry.is_symlink() or self._excluded(path, False):
                    continue  # removed since it was listed
                raise TreeError(self._advice(entry.path, "is a link to nothing")) from None
            except OSError as error:
                raise self._unreadable(entry.path, error) from None
            is_directory = stat.S_ISDIR(status.st_mode)
            if self._excluded(path, is_directory):
                continue
            if entry.is_symlink() and not self._is_inside(entry.path):
                raise TreeError(self._advice(entry.path, f"is a link to {os.path.realpath(entry.path)}, outside"))
            if is_directory:
                yield from self._files(entry.path, f"{path}/", above | {real})
            elif stat.S_ISREG(status.st_mode):
                yield path, status
            else:
                raise TreeError(self._advice(entry.path, "is neither a file nor a directory"))

    def _is_inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(f"{self._source.root}/")

    def _advice(self, path: str, fault: str) -> str:
        inside = os.path.relpath(path, self._source.root)
        return f"{path} {fault}: exclude it (cluster.runtime.excludes: [{inside!r}])"

    def _unreadable(self, path: str, error: OSError) -> TreeError:
        return TreeError(self._advice(path, f"cannot be read ({error.strerror})"))

    def _hash(self, path: str) -> Found:
        full = os.path.join(self._source.root, path)
        self.hashed += 1
        digest = hashlib.sha256()
        try:
            with open(full, "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                while data := file.read(_CHUNK):
                    digest.update(data)
                after = os.fstat(file.fileno())
        except OSError as error:
            raise self._unreadable(full, error) from None
        if stamp(before) != stamp(after):
            raise ChangedError(f"{full} changed while it was read")
        facts = FileFacts(after.st_size, digest.digest(), bool(after.st_mode & stat.S_IXUSR))
        return Found(facts, stamp(after), time.time_ns() - after.st_ctime_ns > self.tick_ns)


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return the numbers that change when a file is written, replaced, or made executable."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


def mib(size: int) -> str:
    """Return a number of bytes as text for people."""
    return f"{size / (1 << 20):,.1f} MiB"


def _pattern(path: str) -> str:
    """Return an example of a pattern that excludes *path*: its directory, or all files with its ending."""
    parent, _, name = path.rpartition("/")
    if parent:
        return f"{parent}/"
    ending = os.path.splitext(name)[1]
    return f"*{ending}" if ending else name
