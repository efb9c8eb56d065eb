"""The receipt of one tree of code from a sender that need not be trusted. One thread at a time; blocks.

Only contents that a checked tree names are accepted, in order and up to their size, and each is hashed before it gets
its name in the store. The tree is built aside, and gets its name when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from io import FileIO

import msgspec

from rlinf_actors.codesync import locks
from rlinf_actors.codesync.code_scan import mib
from rlinf_actors.codesync.code_store import STAMP_S, CodeStore, KeptTree, StoreError, Vacancy, remove_tree
from rlinf_actors.codesync.tree import CACHES, Entry, Expanded, TreeError, digest_of, expand

log = logging.getLogger(__name__)

_SPARE = 64 << 20
"""Bytes of the disk that are left free."""
_COMPILED = re.compile(r"(.+)\.(?!opt-)[^.]+(?:\.opt-\w+)?\.pyc")
"""Name of a file that Python compiled; its group is the name of the source without suffix, which may have dots."""


class _Incoming(msgspec.Struct):
    """A content that is being received, in slices and in order."""

    entry: Entry
    path: str
    file: FileIO
    size: int = 0
    digest: hashlib._Hash = msgspec.field(default_factory=hashlib.sha256)


def receive(store: CodeStore, root: bytes) -> KeptTree | Receiving:
    """Return the tree with the hash *root* if *store* has it, else what receives it. See `CodeStore.acquire`."""
    found = store.acquire(root)
    return found if isinstance(found, KeptTree) else Receiving(store, found)


class Receiving:
    """The receipt of one tree: `offer` its listings, `put` the contents that `offer` asks for, and `finish`.

    Always call `finish` or `abandon`. Not thread-safe: one call at a time.

    Attributes:
        received: bytes of contents that were received.
    """

    def __init__(self, store: CodeStore, vacancy: Vacancy) -> None:
        self.root = vacancy.root
        self.received = 0
        self._store = store
        self._turn = vacancy.turn
        self._lock = vacancy.lock
        self._shared = vacancy.shared
        self._place = os.path.join(store.incoming, uuid.uuid4().hex)
        self._known: dict[bytes, bytes] = {}
        self._others: dict[bytes, bytes] | None = None
        self._tree: Expanded | None = None
        self._missing: dict[bytes, Entry] = {}
        self._open: _Incoming | None = None

    def offer(self, listings: Sequence[bytes]) -> tuple[list[bytes], list[tuple[str, bytes]]]:
        """Add *listings*, and return what is still needed: hashes of listings, or kinds and hashes of contents.

        As long as listings are needed, contents are not known yet. Raise TreeError if the tree breaks a rule, and
        StoreError if it does not fit on the disk.
        """
        for listing in listings:
            self._known[digest_of(listing)] = listing
        tree = expand(self.root, self._listing, self._store.limits)
        if tree.missing:
            return tree.missing, []
        self._tree = tree
        wanted = {(entry.kind, entry.digest): entry for entry in tree.files.values()}
        self._missing = {_key(kind, digest): one for (kind, digest), one in wanted.items() if not self._store.has(one)}
        self._check_room(sum(entry.size for entry in self._missing.values()))
        return [], [(entry.kind, entry.digest) for entry in self._missing.values()]

    def _listing(self, digest: bytes) -> bytes | None:
        if digest in self._known:
            return self._known[digest]
        if self._others is None:
            self._others = {}
            for root in self._store.roots():
                self._others.update(self._store.listings(root))
        return self._others.get(digest)

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self._store.directory).free
        if size + _SPARE > free:
            raise StoreError(
                f"the disk of {self._store.directory} has {mib(free)} free, and the code needs {mib(size)} and "
                f"{mib(_SPARE)} to spare: make room there, or set RLINF_ACTORS_CACHE_DIR on the node"
            )

    def put(self, kind: str, digest: bytes, offset: int, data: bytes) -> None:
        """Write a slice of a content that `offer` has asked for. The slices of a content arrive in order.

        Raise TreeError if the slice was not asked for, is out of order, too long, or has another hash at its end.
        """
        key = _key(kind, digest)
        entry = self._missing.get(key)
        if entry is None:
            raise TreeError(f"content {digest.hex()[:12]} was not asked for")
        try:
            incoming = self._incoming(key, entry, offset)
            if offset != incoming.size or offset + len(data) > entry.size:
                raise TreeError(f"a slice of content {digest.hex()[:12]} is out of order or too long")
            incoming.file.write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._check_room(entry.size)
            raise StoreError(f"{self._store.directory} cannot be written ({error.strerror}): make room there") from None
        incoming.digest.update(data)
        incoming.size += len(data)
        self.received += len(data)
        if incoming.size == entry.size:
            self._complete(incoming)
            del self._missing[key]

    def _incoming(self, key: bytes, entry: Entry, offset: int) -> _Incoming:
        if self._open is not None and self._open.entry is entry:
            return self._open
        if self._open is not None or offset:
            raise TreeError("a slice belongs to another content than the slices before it")
        os.makedirs(self._place, mode=0o700, exist_ok=True)
        path = os.path.join(self._place, key.hex())
        self._open = _Incoming(entry, path, FileIO(path, "wb"))
        return self._open

    def _complete(self, incoming: _Incoming) -> None:
        self._open = None
        incoming.file.close()
        entry = incoming.entry
        if incoming.digest.digest() != entry.digest:
            os.unlink(incoming.path)
            raise TreeError(f"content {entry.digest.hex()[:12]} has another hash: it changed while it was sent")
        os.chmod(incoming.path, 0o555 if entry.kind == "x" else 0o444)
        os.utime(incoming.path, (STAMP_S, STAMP_S))
        os.rename(incoming.path, self._store.object(entry.kind, entry.digest))

    def finish(self) -> KeptTree:
        """Make the tree out of its contents, and return it.

        Raise TreeError if contents are missing, and StoreError if the tree cannot be written.
        """
        if self._tree is None or self._missing:
            raise TreeError(f"{len(self._missing)} contents of tree {self.root.hex()[:12]} are missing")
        entry = self._store.entry(self.root)
        place = os.path.join(self._place, "tree")
        try:
            os.makedirs(place, mode=0o700)
            self._build(place)
            with open(f"{entry}.listings", "wb") as file:
                file.write(msgspec.msgpack.encode(list(self._tree.listings.values())))
            os.rename(place, entry)
            os.chmod(entry, 0o555)  # only now: moving a directory takes the right to write to it
        except OSError as error:
            raise StoreError(f"{entry} cannot be made ({error.strerror}): make room there") from None
        self._lock.touch()
        stays = self._lock.share()
        self._done()
        if not stays:
            self._lock.release()
            raise StoreError(f"{entry} was removed as soon as it was made: RLINF_ACTORS_CODE_CACHE_BYTES is too small")
        return KeptTree(entry, self.root, self._lock)

    def _build(self, place: str) -> None:
        assert self._tree is not None
        for directory in self._tree.directories:
            os.mkdir(os.path.join(place, directory), 0o700)
        for path, entry in self._tree.files.items():
            source, target = self._store.object(entry.kind, entry.digest), os.path.join(place, path)
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                shutil.copy2(source, target)
        with_python = {os.path.dirname(path) for path in self._tree.files if path.endswith(".py")}
        for directory in with_python:
            os.mkdir(os.path.join(place, directory, CACHES), 0o700)
        self._reuse_caches(place)
        for directory in self._tree.directories:
            os.chmod(os.path.join(place, directory), 0o555)

    def _reuse_caches(self, place: str) -> None:
        """Link what Python compiled in the last used tree, for files that are the same here.

        Else each change of one file would make every worker compile all others again.
        """
        assert self._tree is not None
        for root in self._store.roots()[:1]:
            base = self._store.entry(root)
            lock = locks.hold(base, wait=False)
            if lock is None:
                continue
            try:
                files = self._store.expanded(root).files
                same = {path for path, entry in self._tree.files.items() if files.get(path) == entry}
                _link_caches(base, place, same)
            except (OSError, TreeError) as error:
                log.info("compiled code of %s is not used again: %s", base, error)
            finally:
                lock.release()

    def abandon(self) -> None:
        """End without a tree. Complete contents stay for a while, so that the next attempt need not send them again."""
        if self._open is not None:
            self._open.file.close()
            self._open = None
        self._lock.release()
        self._done()

    def _done(self) -> None:
        remove_tree(self._place)
        self._shared.release()
        self._turn.remove()
        self._turn.release()


def _key(kind: str, digest: bytes) -> bytes:
    return kind.encode() + digest


def _link_caches(base: str, place: str, same: Iterable[str]) -> None:
    wanted: dict[str, set[str]] = {}
    for path in same:
        directory, _, name = path.rpartition("/")
        if name.endswith(".py"):
            wanted.setdefault(directory, set()).add(name[:-3])
    for directory, stems in wanted.items():
        caches = os.path.join(base, directory, CACHES)
        for name in os.listdir(caches) if os.path.isdir(caches) else ():
            found = _COMPILED.fullmatch(name)
            if found is not None and found[1] in stems:
                os.link(os.path.join(caches, name), os.path.join(place, directory, CACHES, name))
