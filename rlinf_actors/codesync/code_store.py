"""The trees of code that this node has received: kept by root hash, shared by the jobs of one user. Any thread; blocks.

Layout, below Places.code:

* ``objects/KIND-HASH``: the content of a file, read-only, with a fixed time. With this name, it is complete.
* ``trees/ROOT``: a tree, read-only, whose files are hard links to objects. With this name, it is complete.
* ``trees/ROOT.lock``: held shared by each process that uses the tree, exclusively by the one that receives it.
* ``trees/ROOT.listings``: the tree's listings, so that later trees need not be sent whole.
* ``incoming/``: contents and trees that are not complete. What a killed process left there is removed later.
* ``store.lock``: held shared while a tree is received, exclusively while unused objects are removed.

A sender need not be trusted: only contents that a checked tree names are accepted, up to their size, and each is hashed
before it gets its name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time

import msgspec

from rlinf_actors import procfs
from rlinf_actors.codesync import locks
from rlinf_actors.codesync.places import Places
from rlinf_actors.codesync.tree import CACHES, Entry, Expanded, TreeError, digest_of, expand

log = logging.getLogger(__name__)

STAMP_S = 1_000_000_000
"""Modification time of every object. A file with another time was written to."""
MAX_TREES = 32
"""Most trees that are kept if no process uses them."""
_ORPHAN_S = 3600.0
"""Seconds after which a content that no tree uses is removed. Until then an interrupted transfer can go on with it."""
_SPARE = 64 << 20
"""Bytes of the disk that are left free."""
_CHUNK = 1 << 20


class StoreError(TreeError):
    """This node cannot keep a tree: no room, or a file of the cache was changed. The text says what to do."""


class KeptTree(msgspec.Struct):
    """A complete tree that this process uses; no process removes it before `release`.

    Attributes:
        path: directory of the tree.
        root: its hash.
    """

    path: str
    root: bytes
    lock: locks.Lock

    def release(self) -> None:
        """Let other processes remove the tree."""
        self.lock.release()


class Vacancy(msgspec.Struct):
    """The right to make one tree: the turn, its exclusive lock, and the shared lock of the store."""

    root: bytes
    turn: locks.Lock
    lock: locks.Lock
    shared: locks.Lock


class CodeStore:
    """The trees below one directory. Several processes may use it at once."""

    def __init__(self, places: Places) -> None:
        self.limits = places.limits
        self._places = places
        self.directory = places.code
        self.trees = os.path.join(self.directory, "trees")
        self.objects = os.path.join(self.directory, "objects")
        self.incoming = os.path.join(self.directory, "incoming")

    def open(self) -> None:
        """Make the directories. Raise ConfigError if they cannot be used."""
        self._places.make(self.directory)
        for place in (self.trees, self.objects, self.incoming):
            os.makedirs(place, mode=0o700, exist_ok=True)

    def entry(self, root: bytes) -> str:
        """Return the directory of the tree with the hash *root*."""
        return os.path.join(self.trees, root.hex())

    def object(self, kind: str, digest: bytes) -> str:
        """Return the path of the content with this kind and hash."""
        return os.path.join(self.objects, f"{kind}-{digest.hex()}")

    def acquire(self, root: bytes) -> KeptTree | Vacancy:
        """Return the tree with the hash *root*, or the right to make it if the node does not have it.

        Blocks while another process receives the same tree. Raise StoreError if the tree was changed on the disk and
        is in use.
        """
        kept, _ = self._hold(root)
        if kept is not None:
            return kept
        turn = locks.take_turn(self.entry(root))
        vacancy = None
        try:
            kept, changed = self._hold(root)
            if kept is not None:
                return kept
            vacancy = self._vacancy(root, turn, changed)
            return vacancy
        finally:
            if vacancy is None:
                turn.remove()
                turn.release()

    def _hold(self, root: bytes) -> tuple[KeptTree | None, str]:
        """Return the tree if the node has it, else None and how a tree in its place was changed ("" if none is there).

        Blocks while another process receives the tree.
        """
        entry, changed = self.entry(root), ""
        lock = locks.hold(entry)
        assert lock is not None
        try:
            if os.path.isdir(entry) and lock.stands() and not (changed := self.fault(root)):
                lock.touch()
                return KeptTree(entry, root, lock), ""
        except BaseException:
            lock.release()
            raise
        lock.release()
        return None, changed

    def _vacancy(self, root: bytes, turn: locks.Lock, changed: str) -> Vacancy:
        entry = self.entry(root)
        alone = locks.take(entry, wait=False)
        if alone is None and changed:
            raise StoreError(
                f"the copy {entry} was changed after it was received ({changed}), and processes use it: let them "
                "end, and let workers write elsewhere"
            )
        while alone is None:  # the tree was removed by hand, and those who use it hold the lock as long as they run
            shared = locks.hold(entry)  # waits for a process that removes what is left of the tree
            assert shared is not None
            shared.remove()
            shared.release()
            alone = locks.take(entry, wait=False)
        try:
            if os.path.isdir(entry):
                log.warning("%s was changed after it was received (%s): it is received again", entry, changed)
                remove_tree(entry)
            shared = locks.hold(os.path.join(self.directory, "store"))
            assert shared is not None
            return Vacancy(root, turn, alone, shared)
        except BaseException:
            alone.release()
            raise

    # --- what is there ---

    def listings(self, root: bytes) -> dict[bytes, bytes]:
        """Return the listings of a kept tree by hash; {} if they cannot be read."""
        try:
            with open(f"{self.entry(root)}.listings", "rb") as file:
                kept = msgspec.msgpack.decode(file.read(), type=list[bytes])
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return {}
        return {digest_of(listing): listing for listing in kept}

    def expanded(self, root: bytes) -> Expanded:
        """Return a kept tree as its listings describe it. Raise TreeError if they cannot be read."""
        return expand(root, self.listings(root).get, self._places.limits)

    def fault(self, root: bytes) -> str:
        """Return how a complete tree differs from its listings: the name of a file; "" if it does not differ.

        Sizes and times are compared; contents too if the machine was restarted since the last use, because what was
        written shortly before a crash may be lost.
        """
        entry = self.entry(root)
        try:
            tree = self.expanded(root)
        except TreeError as error:
            return str(error)
        if tree.missing:
            return f"{entry}.listings"
        thorough = locks.last_used(entry) < boot_time()
        for path, one in tree.files.items():
            if not self._is_intact(os.path.join(entry, path), one, thorough):
                return path
        return ""

    def _is_intact(self, path: str, entry: Entry, thorough: bool = False) -> bool:
        try:
            status = os.lstat(path)
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or (status.st_size, status.st_mtime_ns) != (entry.size, STAMP_S * 10**9):
            return False
        return not thorough or hash_of(path) == entry.digest

    def has(self, entry: Entry) -> bool:
        """Return True if the node has the content of *entry*. A changed content is removed."""
        path = self.object(entry.kind, entry.digest)
        thorough = False
        try:
            status = os.lstat(path)
            thorough = status.st_ctime < boot_time()
        except OSError:
            return False
        if self._is_intact(path, entry, thorough):
            return True
        os.unlink(path)
        return False

    def roots(self) -> list[bytes]:
        """Return the hashes of the kept trees, the last used first."""
        names = [name for name in os.listdir(self.trees) if len(name) == 64 and "." not in name]
        names.sort(key=lambda name: -locks.last_used(os.path.join(self.trees, name)))
        return [bytes.fromhex(name) for name in names]

    # --- removal ---

    def trim(self) -> list[str]:
        """Remove trees and contents beyond the bounds, the longest unused first, and return the trees' names.

        Trees that a process uses stay. If another process is receiving a tree, nothing is removed.
        """
        alone = locks.take(os.path.join(self.directory, "store"), wait=False)
        if alone is None:
            return []
        try:
            for name in os.listdir(self.incoming):  # no process is receiving: their makers were killed
                remove_tree(os.path.join(self.incoming, name))
            bound = self._places.settings.cache_bytes
            size, removed = self._remove_orphans(_ORPHAN_S), []
            roots = self.roots()
            while roots and (size > bound or len(roots) > MAX_TREES):
                root = roots.pop()
                if self._remove(root):
                    removed.append(root.hex())
                    size = self._remove_orphans(0.0)
            return removed
        finally:
            alone.release()

    def _remove(self, root: bytes) -> bool:
        entry = self.entry(root)
        lock = locks.take(entry, wait=False)
        if lock is None:
            return False
        try:
            if strange := self._foreign(root):
                text = "%s is kept although it is unused, because workers wrote %s into it: remove it by hand"
                log.warning(text, entry, strange)
                return False
            remove_tree(f"{entry}.listings")
            remove_tree(entry)
            lock.remove()
        finally:
            lock.release()
        return True

    def _foreign(self, root: bytes) -> str:
        """Return a file in a tree that was not received, "" if there is none. Python's caches do not count."""
        try:
            expected = self.expanded(root).files
        except TreeError:
            return ""
        entry = self.entry(root)
        for place, inner, files in os.walk(entry):
            inner[:] = [name for name in inner if name != CACHES]
            for name in files:
                path = os.path.relpath(os.path.join(place, name), entry)
                if path not in expected:
                    return path
        return ""

    def _remove_orphans(self, age_s: float) -> int:
        """Remove contents that no tree links to and that are older than *age_s*. Return the bytes of the others."""
        size, now = 0, time.time()
        with os.scandir(self.objects) as found:
            for one in found:
                status = one.stat(follow_symlinks=False)
                if status.st_nlink == 1 and now - status.st_ctime > age_s:
                    os.unlink(one.path)
                else:
                    size += status.st_size
        return size


def remove_tree(path: str) -> None:
    """Remove *path* and all below it, also read-only directories. Links are removed, not followed."""
    if not os.path.isdir(path) or os.path.islink(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    os.chmod(path, 0o700)
    for place, inner, _ in os.walk(path):
        for name in inner:
            if not os.path.islink(directory := os.path.join(place, name)):
                os.chmod(directory, 0o700)  # before os.walk reads it
    shutil.rmtree(path)


def hash_of(path: str) -> bytes:
    """Return the SHA-256 of the file *path*."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.digest()


_boot: list[float] = []


def boot_time() -> float:
    """Return when this machine was started, in seconds since the epoch."""
    if not _boot:
        lines = procfs.text_of("/proc/stat").splitlines()
        _boot.append(next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0))
    return _boot[0]
