"""The hash tree: what a root hash fixes, and what a node refuses from a sender that it need not trust."""

from __future__ import annotations

import hashlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.codesync.tree import (
    CACHES,
    Entry,
    FileFacts,
    TreeError,
    TreeLimits,
    build,
    decode,
    digest_of,
    directories_of,
    expand,
)


def facts(text: str = "", executable: bool = False) -> FileFacts:
    return FileFacts(len(text), hashlib.sha256(text.encode()).digest(), executable)


def listing(*entries: Entry) -> bytes:
    return msgspec.msgpack.encode(list(entries))


def entry(name: str = "a", kind: str = "f", size: int = 0, digest: bytes = bytes(32)) -> Entry:
    return Entry(name, kind, size, digest)  # type: ignore[arg-type]


FILES = {"a.py": facts("a"), "pkg/__init__.py": facts(), "pkg/b.py": facts("bb"), "pkg/sub/run": facts("run", True)}


class TestRootHash:
    def test_same_files_in_another_order_have_the_same_hash(self):
        assert build(FILES).root == build(dict(reversed(FILES.items()))).root

    @pytest.mark.parametrize(
        "change",
        [{"a.py": facts("b")}, {"a.py": facts("a", True)}, {"new": facts()}, {"pkg/sub/run": facts("ran", True)}],
        ids=["content", "mode", "new file", "deep file"],
    )
    def test_every_change_changes_it(self, change):
        assert build(FILES).root != build({**FILES, **change}).root

    def test_changed_file_changes_only_the_listings_above_it(self):
        before, after = build(FILES), build({**FILES, "pkg/b.py": facts("changed")})
        assert len(before.listings) == 3
        assert len(after.listings.keys() - before.listings.keys()) == 2  # of the root and of pkg

    def test_it_does_not_depend_on_the_version_of_this_code(self):
        assert build({"a": facts("a")}).root.hex() == "e9a20470af0d5c451c0ae36aff43986d3fe3eb4ead5a0b4a5d731ea9d989e253"

    def test_file_and_directory_of_one_name_are_refused(self):
        with pytest.raises(TreeError, match="both a file and a directory"):
            build({"a": facts(), "a/b": facts()})

    @pytest.mark.parametrize("path", ["../a", "a/../b", "/a", "a//b", "./a", "", "a\0b", f"x/{CACHES}/y", "n" * 256])
    def test_paths_that_leave_the_tree_are_not_built(self, path):
        with pytest.raises(TreeError):
            build({path: facts()})


class TestExpand:
    def test_built_tree_expands_to_its_files(self):
        tree = build(FILES)
        found = expand(tree.root, tree.listings.get, TreeLimits())
        assert {path: (one.kind, one.size, one.digest) for path, one in found.files.items()} == {
            path: (one.kind, one.size, one.digest) for path, one in FILES.items()
        }
        assert found.directories == ["pkg", "pkg/sub"]
        assert found.missing == []
        assert found.size == tree.size == 6
        assert found.listings == tree.listings

    @given(
        st.dictionaries(st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=4).map(tuple), st.text())
    )
    def test_any_tree_survives_the_journey(self, given):
        files: dict[str, FileFacts] = {}
        for path, text in given.items():
            name = "/".join(path) + ".f"  # no directory has this ending
            files[name] = facts(text.encode(errors="replace").decode())
        tree = build(files)
        found = expand(tree.root, tree.listings.get, TreeLimits())
        assert found.files.keys() == files.keys()
        assert set(found.directories) == directories_of(files) - {""}

    def test_unknown_listings_are_asked_for(self):
        tree = build(FILES)
        known = dict(tree.listings)
        sub = digest_of(listing(entry("run", "x", 3, hashlib.sha256(b"run").digest())))
        del known[sub]
        assert expand(tree.root, known.get, TreeLimits()).missing == [sub]

    def test_more_than_the_limits_is_refused(self):
        tree = build(FILES)
        for limits, text in (
            (TreeLimits(entries=5), "more than 5 files"),
            (TreeLimits(size=5), "more than 0 MiB"),
            (TreeLimits(depth=2), "deeper"),
        ):
            with pytest.raises(TreeError, match=text):
                expand(tree.root, tree.listings.get, limits)

    def test_listings_that_repeat_one_another_do_not_explode(self):
        """Sixty-four listings, each with the next one a thousand times, would be 10**192 files."""
        listings = {}
        digest, size = digest_of(listing()), 0
        listings[digest] = listing()
        for _ in range(60):
            made = listing(*(entry(f"{n:04}", "d", size, digest) for n in range(1000)))
            digest = digest_of(made)
            listings[digest] = made
        with pytest.raises(TreeError, match="more than 50,000"):
            expand(digest, listings.get, TreeLimits())

    def test_directory_with_another_size_than_announced_is_refused(self):
        inner = listing(entry("a", "f", 10))
        root = listing(entry("d", "d", 5, digest_of(inner)))
        known = {digest_of(inner): inner, digest_of(root): root}
        with pytest.raises(TreeError, match="size"):
            expand(digest_of(root), known.get, TreeLimits())


class TestRefusals:
    @pytest.mark.parametrize(
        "name", ["..", ".", "", "a/b", "/etc", "a\0", "x" * 256, CACHES, "é" * 200], ids=lambda name: repr(name)[:12]
    )
    def test_name_that_must_not_be_in_a_tree_is_refused(self, name):
        with pytest.raises(TreeError):
            decode(listing(entry(name)))

    @pytest.mark.parametrize(
        "data",
        [
            b"", b"\xc1", b"\x91", listing(entry("b"), entry("a")), listing(entry("a"), entry("a")),
            msgspec.msgpack.encode([["a", "l", 0, bytes(32)]]), msgspec.msgpack.encode([["a", "c", 0, bytes(32)]]),
            msgspec.msgpack.encode([["a", "f", -1, bytes(32)]]),
            msgspec.msgpack.encode([["a", "f", 1 << 60, bytes(32)]]),
            msgspec.msgpack.encode([["a", "f", 0, bytes(31)]]), msgspec.msgpack.encode([["a", "f", 0, bytes(32), 1]]),
            msgspec.msgpack.encode([[b"a", "f", 0, bytes(32)]]), b"\xdc\x00\x00", b"\x91" * 5000,
        ],
        ids=["empty", "invalid", "cut", "unsorted", "twice", "link", "device", "negative", "huge", "short hash",
             "field", "bytes as name", "other form", "nested"],
    )  # fmt: skip
    def test_malformed_listing_is_refused(self, data):
        with pytest.raises(TreeError):
            decode(data)

    @given(st.binary(max_size=200))
    def test_random_bytes_are_refused_or_in_normal_form(self, data):
        try:
            entries = decode(data)
        except TreeError:
            return
        assert msgspec.msgpack.encode(entries) == data

    def test_changed_bytes_of_a_listing_never_leave_the_tree(self):
        rng = random.Random(5)
        seed = listing(*(entry(name, kind, 3) for name, kind in (("a", "f"), ("b.py", "x"), ("c", "d"), ("d", "d"))))
        for _ in range(3000):
            data = bytearray(seed)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), ord("."), ord("/"), 0])
            known = {digest_of(bytes(data)): bytes(data)}
            try:
                found = expand(digest_of(bytes(data)), known.get, TreeLimits())
            except TreeError:
                continue
            for path in [*found.files, *found.directories]:
                assert path
                assert not path.startswith("/")
                assert not {"", ".", ".."} & set(path.split("/"))
                assert "\0" not in path
