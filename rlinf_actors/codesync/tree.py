"""The hash tree of a directory of code: listings of directories, and the root hash that names all of it. Pure.

A listing has an entry for each file and directory: its name, kind, size and hash. The hash of a directory is the hash
of its listing, so the root hash fixes every path, mode and content, and two trees that share a directory share its
listing. The driver builds a tree by `build`. A node gets listings from a driver that it need not trust: `decode` and
`expand` accept only listings that describe a plain tree of bounded size. A tree has regular files and directories, and
nothing else: the format has no links, devices or absolute paths, and names such as ``..`` are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal

import msgspec

from rlinf_actors.errors import RlinfActorsError

DIGEST_BYTES = 32
MAX_NAME = 255
"""Longest name of a file or directory, in bytes, that file systems take."""
MAX_DEPTH = 64
MAX_PATH = 2000
CACHES = "__pycache__"
"""Name of the directories that Python writes beside the code. They are never part of a tree."""
_DIRECTORY = b"rlinf-actors directory 1\n"

Kind = Literal["d", "f", "x"]
"""Directory, file, executable file."""
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class TreeError(RlinfActorsError, ValueError):
    """A directory cannot be sent as code, or a received tree breaks a rule. The text names the file."""


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line of a listing.

    Attributes:
        name: name of the file or directory, without a slash.
        kind: "d", "f", or "x" for a file that may be executed.
        size: bytes of the file, or of all files below the directory.
        digest: SHA-256 of the content, or of the directory's listing.
    """

    name: str
    kind: Kind
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    digest: Digest


class FileFacts(msgspec.Struct, frozen=True):
    """What the tree records of a file: its size in bytes, the hash of its content, and whether it is executable."""

    size: int
    digest: bytes
    executable: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of the file's entry."""
        return "x" if self.executable else "f"


class TreeLimits(msgspec.Struct, frozen=True):
    """The largest tree that a node accepts: number of files and directories, bytes of all files, depth."""

    entries: int = 50_000
    size: int = 1 << 30
    depth: int = MAX_DEPTH


class Tree(msgspec.Struct, frozen=True):
    """A directory of code as the driver sends it.

    Attributes:
        root: hash of the root's listing.
        listings: the listing of each directory, by hash.
        files: the files by path, relative to the root and with slashes.
    """

    root: bytes
    listings: Mapping[bytes, bytes]
    files: Mapping[str, FileFacts]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(facts.size for facts in self.files.values())


class _Directory(msgspec.Struct):
    files: dict[str, FileFacts] = msgspec.field(default_factory=dict)
    inner: dict[str, _Directory] = msgspec.field(default_factory=dict)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def build(files: Mapping[str, FileFacts]) -> Tree:
    """Return the tree of *files*, whose keys are paths relative to the root, with slashes.

    Raise TreeError if a path cannot be part of a tree.
    """
    root = _Directory()
    for path, facts in files.items():
        *parents, name = path.split("/")
        if len(parents) >= MAX_DEPTH or len(path) > MAX_PATH:
            raise TreeError(f"{path[:100]!r}... is too long or too deep to be sent")
        place = root
        for part in parents:
            _check_name(part, path)
            place = place.inner.setdefault(part, _Directory())
        _check_name(name, path)
        place.files[name] = facts
    listings: dict[bytes, bytes] = {}
    digest, _ = _encode(root, listings)
    return Tree(digest, listings, dict(files))


def _encode(directory: _Directory, listings: dict[bytes, bytes]) -> tuple[bytes, int]:
    entries = [Entry(name, facts.kind, facts.size, facts.digest) for name, facts in directory.files.items()]
    for name, inner in directory.inner.items():
        if name in directory.files:
            raise TreeError(f"{name!r} is both a file and a directory")
        digest, size = _encode(inner, listings)
        entries.append(Entry(name, "d", size, digest))
    entries.sort(key=lambda entry: entry.name)
    listing = _encoder.encode(entries)
    digest = digest_of(listing)
    listings[digest] = listing
    return digest, sum(entry.size for entry in entries)


def digest_of(listing: bytes) -> bytes:
    """Return the hash of a directory with this *listing*."""
    return hashlib.sha256(_DIRECTORY + listing).digest()


def decode(listing: bytes) -> list[Entry]:
    """Return the entries of a received *listing*.

    Raise TreeError if it is malformed, not in normal form, or has a name that must not be in a tree.
    """
    try:
        entries = _decoder.decode(listing)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise TreeError(f"a listing is malformed: {error}") from None
    before = ""
    for entry in entries:
        _check_name(entry.name, entry.name)
        if entry.name <= before:
            raise TreeError(f"a listing is not sorted, or has {entry.name!r} twice")
        before = entry.name
    if _encoder.encode(entries) != listing:  # else one tree could have two hashes
        raise TreeError("a listing is not in its normal form")
    return entries


def _check_name(name: str, path: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise TreeError(f"the name {path!r} is not valid UTF-8: rename or exclude it") from None
    if not name or name in (".", "..", CACHES) or "/" in name or "\0" in name or size > MAX_NAME:
        raise TreeError(f"{path[:300]!r} has a part that must not be in a tree of code: {name[:300]!r}")


class Expanded(msgspec.Struct, frozen=True):
    """A tree as the files and directories that it consists of.

    Attributes:
        files: the entry of each file, by path relative to the root.
        directories: paths of the directories below the root; a directory comes before what it contains.
        missing: hashes of listings that are not known. If there are any, the tree is incomplete.
        size: bytes of all files together.
        listings: the listings that the tree uses, by hash.
    """

    files: dict[str, Entry]
    directories: list[str]
    missing: list[bytes]
    size: int
    listings: dict[bytes, bytes]


def expand(root: bytes, listing_of: Callable[[bytes], bytes | None], limits: TreeLimits) -> Expanded:
    """Return the tree with the hash *root*, as far as its listings are known.

    *listing_of* returns the listing with a hash, None if it is not known. Raise TreeError if a listing breaks a rule
    or the tree is larger than *limits*; this takes time and memory in proportion to *limits* at most.
    """
    found = Expanded({}, [], [], 0, {})
    size = count = 0
    waiting: list[tuple[str, int, bytes, int | None]] = [("", 0, root, None)]
    while waiting:
        prefix, depth, digest, declared = waiting.pop()
        listing = listing_of(digest)
        if listing is None:
            found.missing.append(digest)
            continue
        found.listings[digest] = listing
        entries = decode(listing)
        if declared is not None and sum(entry.size for entry in entries) != declared:
            raise TreeError(f"directory {prefix!r} does not have the size that its parent gives")
        for entry in entries:
            count += 1
            path = prefix + entry.name
            if count > limits.entries:
                raise TreeError(f"the tree has more than {limits.entries:,} files and directories")
            if len(path) > MAX_PATH:
                raise TreeError(f"the path {path[:100]!r}... is longer than {MAX_PATH} characters")
            if entry.kind != "d":
                size += entry.size
                if size > limits.size:
                    raise TreeError(f"the tree has more than {limits.size >> 20:,} MiB")
                found.files[path] = entry
                continue
            if depth + 1 >= limits.depth:
                raise TreeError(f"{path[:100]!r} is deeper than {limits.depth} directories")
            found.directories.append(path)
            waiting.append((f"{path}/", depth + 1, entry.digest, entry.size))
    return Expanded(found.files, found.directories, list(dict.fromkeys(found.missing)), size, found.listings)


def directories_of(paths: Mapping[str, object]) -> set[str]:
    """Return the directories, relative to the root, that contain the files *paths*; "" is the root."""
    return {parent for path in paths for parent in _parents(path)} | {""}


def _parents(path: str) -> Iterator[str]:
    while (cut := path.rfind("/")) >= 0:
        path = path[:cut]
        yield path
