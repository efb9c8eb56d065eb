"""What a node keeps of drivers' code: received in slices, checked, shared, and removed when no process uses it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import threading
from collections import namedtuple
from pathlib import Path

import msgspec
import pace
import pytest
from code_kit import content, random_files, send, snapshot, store, write

from rlinf_actors.codesync import code_store as store_module
from rlinf_actors.codesync import locks
from rlinf_actors.codesync.code_store import KeptTree, StoreError
from rlinf_actors.codesync.receiving import Receiving, receive
from rlinf_actors.codesync.tree import Entry, TreeError, digest_of

FILES = {"train.py": "a = 1", "pkg/__init__.py": "", "pkg/mod.py": "b = 2", "pkg/sub/data.bin": bytes(range(256)) * 50}


def receiving(found: KeptTree | Receiving) -> Receiving:
    assert isinstance(found, Receiving)
    return found


class TestTransfer:
    def test_copy_equals_the_drivers_directory(self, tmp_path):
        root = write(tmp_path / "code", FILES)
        (root / "train.py").chmod(0o755)
        kept, sent = send(store(tmp_path / "cache"), snapshot(root), slice_bytes=100)
        assert content(kept.path) == content(root)
        assert sorted(sent) == sorted(FILES)

    @pytest.mark.parametrize("seed", range(5))
    def test_any_two_versions_arrive_and_only_new_contents_travel(self, tmp_path, seed):
        rng = random.Random(seed)
        to = store(tmp_path / "cache")
        files = random_files(rng, 30)
        first = write(tmp_path / "1", files)
        kept, _ = send(to, snapshot(first))
        assert content(kept.path) == content(first)
        changed = {name: data for name, data in files.items() if rng.random() < 0.9}
        for name in rng.sample(sorted(changed), 3):
            changed[name] = rng.randbytes(50)
        second = write(tmp_path / "2", changed)
        kept, sent = send(to, snapshot(second))
        assert content(kept.path) == content(second)
        assert {changed[name] for name in sent} == set(changed.values()) - set(files.values())

    def test_same_tree_again_sends_nothing(self, tmp_path):
        code = snapshot(write(tmp_path / "code", FILES))
        to = store(tmp_path / "cache")
        first, _ = send(to, code)
        second, sent = send(store(tmp_path / "cache"), code)
        assert (second.path, sent) == (first.path, [])

    def test_copy_cannot_be_written_to(self, tmp_path):
        kept, _ = send(store(tmp_path / "cache"), snapshot(write(tmp_path / "code", FILES)))
        for place, _, files in os.walk(kept.path):
            if os.path.basename(place) != "__pycache__":  # Python may keep what it compiles
                assert not os.stat(place).st_mode & 0o222
            assert not any(os.stat(os.path.join(place, name)).st_mode & 0o222 for name in files)

    def test_compiled_code_of_unchanged_files_is_used_again(self, tmp_path):
        root, to = write(tmp_path / "code", FILES), store(tmp_path / "cache")
        kept, _ = send(to, snapshot(root))
        for name in ("mod.cpython-311.pyc", "__init__.cpython-311.pyc", "strange.txt"):
            Path(kept.path, "pkg", "__pycache__", name).write_text(name)
        write(root, {"pkg/mod.py": "b = 3"})
        kept, _ = send(to, snapshot(root))
        assert os.listdir(Path(kept.path, "pkg", "__pycache__")) == ["__init__.cpython-311.pyc"]

    def test_compiled_code_of_another_file_with_the_same_beginning_is_not_used(self, tmp_path):
        """All files have one time, so Python would take it for that of a changed file of the same size."""
        root, to = write(tmp_path / "code", {"lr.py": "", "lr.v2.py": "a = 1"}), store(tmp_path / "cache")
        kept, _ = send(to, snapshot(root))
        names = ["lr.cpython-311.pyc", "lr.cpython-311.opt-1.pyc", "lr.v2.cpython-311.pyc"]
        for name in names:
            Path(kept.path, "__pycache__", name).write_text(name)
        write(root, {"lr.v2.py": "a = 2"})
        kept, _ = send(to, snapshot(root))
        assert sorted(os.listdir(Path(kept.path, "__pycache__"))) == sorted(names[:2])

    def test_interrupted_transfer_goes_on_where_it_was(self, tmp_path):
        code, to = snapshot(write(tmp_path / "code", FILES)), store(tmp_path / "cache")
        begun = receiving(receive(to, code.tree.root))
        _, contents = begun.offer(list(code.tree.listings.values()))
        by_name = {name: (one.facts.kind, one.facts.digest) for name, one in code.found.items()}
        begun.put(*by_name["train.py"], 0, b"a = 1")
        begun.put(*by_name["pkg/sub/data.bin"], 0, bytes(range(100)))
        begun.abandon()
        assert os.listdir(to.incoming) == []
        again = receiving(receive(to, code.tree.root))
        assert again.offer(list(code.tree.listings.values()))[1] == [
            one for one in contents if one != by_name["train.py"]
        ]
        again.abandon()

    def test_node_without_room_says_so_before_it_takes_anything(self, tmp_path, monkeypatch):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1000))
        with pytest.raises(StoreError, match=r"0.0 MiB free.*make room there, or set RLINF_ACTORS_CACHE_DIR"):
            send(store(tmp_path / "cache"), snapshot(write(tmp_path / "code", FILES)))

    @pytest.mark.parametrize(("settings", "text"), [({"max_files": 4}, "more than 4"), ({"max_bytes": 99}, "MiB")])
    def test_tree_beyond_the_nodes_limits_is_refused(self, tmp_path, settings, text):
        with pytest.raises(TreeError, match=text):
            send(store(tmp_path / "cache", **settings), snapshot(write(tmp_path / "code", FILES)))

    def test_two_senders_of_one_tree_send_it_once(self, tmp_path):
        code, place = snapshot(write(tmp_path / "code", FILES)), tmp_path / "cache"
        store(place)
        sent: list[list[str]] = []
        paths: set[str] = set()

        def sender() -> None:
            kept, names = send(store(place), code)
            sent.append(names)
            paths.add(kept.path)

        threads = [threading.Thread(target=sender) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(pace.PATIENCE_S)
        assert sorted(map(len, sent)) == [0, 0, 0, 0, 0, len(FILES)]
        assert len(paths) == 1

    def test_a_sender_gets_the_tree_that_another_made_and_still_uses(self, tmp_path, monkeypatch):
        code, to = snapshot(write(tmp_path / "code", FILES)), store(tmp_path / "cache")
        release, used = locks.Lock.release, []

        def release_and_let_another_send(lock: locks.Lock) -> None:
            release(lock)
            monkeypatch.setattr(locks.Lock, "release", release)
            used.append(send(to, code)[0])

        monkeypatch.setattr(locks.Lock, "release", release_and_let_another_send)
        found: list[tuple[KeptTree, list[str]]] = []
        thread = threading.Thread(target=lambda: found.append(send(to, code)), daemon=True)
        thread.start()
        thread.join(pace.PATIENCE_S)
        assert [(kept.path, names) for kept, names in found] == [(used[0].path, [])]
        assert not list(Path(to.trees).glob("*.turn.lock"))


class TestHostileSender:
    """Whoever speaks for a member of the job cannot write outside the store, or make it hold another content."""

    def begun(self, tmp_path: Path) -> tuple[Receiving, list[tuple[str, bytes]]]:
        code = snapshot(write(tmp_path / "code", {"a.py": "aaaa", "b.py": "bbbb"}))
        found = receiving(receive(store(tmp_path / "cache"), code.tree.root))
        _, contents = found.offer(list(code.tree.listings.values()))
        return found, contents

    @pytest.mark.parametrize(
        ("offset", "data", "text"),
        [
            (0, b"aaaaa", "too long"), (4, b"", "another content"), (2, b"a", "another content"), (-1, b"a", "another"),
            (0, b"zzzz", "another hash"), (1 << 70, b"a", "another content"),
        ],
    )  # fmt: skip
    def test_slice_that_does_not_fit_is_refused(self, tmp_path, offset, data, text):
        found, contents = self.begun(tmp_path)
        with pytest.raises(TreeError, match=text):
            found.put(*contents[0], offset, data)
        with pytest.raises(TreeError, match="missing"):
            found.finish()
        found.abandon()

    def test_content_that_was_not_asked_for_is_refused(self, tmp_path):
        found, contents = self.begun(tmp_path)
        for kind, digest in [("f", bytes(32)), ("x", contents[0][1]), ("../f", contents[0][1]), ("f", b"../../x")]:
            with pytest.raises(TreeError, match="not asked for"):
                found.put(kind, digest, 0, b"aaaa")
        found.abandon()

    def test_slices_of_two_contents_do_not_mix(self, tmp_path):
        found, contents = self.begun(tmp_path)
        found.put(*contents[0], 0, b"a")
        with pytest.raises(TreeError, match="another content"):
            found.put(*contents[1], 0, b"b")
        found.abandon()

    def test_listing_with_another_hash_does_not_help(self, tmp_path):
        to = store(tmp_path / "cache")
        found = receiving(receive(to, bytes(32)))
        evil = msgspec.msgpack.encode([Entry("a", "f", 0, bytes(32))])
        assert found.offer([evil]) == ([bytes(32)], [])
        found.abandon()

    @pytest.mark.parametrize("name", ["..", "../../etc", "/etc/passwd", "a/b", "__pycache__"])
    def test_name_that_leaves_the_tree_is_refused_before_any_file_is_made(self, tmp_path, name):
        listing = msgspec.msgpack.encode([Entry(name, "f", 0, hashlib.sha256().digest())])
        to = store(tmp_path / "cache")
        found = receiving(receive(to, digest_of(listing)))
        with pytest.raises(TreeError, match="must not be in a tree"):
            found.offer([listing])
        found.abandon()
        assert os.listdir(to.incoming) == os.listdir(to.objects) == []

    def test_random_offers_and_slices_write_nothing_outside(self, tmp_path):
        """Random senders: whatever they say is refused by TreeError, and the store's parent has no other file."""
        rng = random.Random(3)
        code = snapshot(write(tmp_path / "code", FILES))
        to = store(tmp_path / "outer" / "cache")
        listings = list(code.tree.listings.values())
        refused = 0
        for _ in range(300):
            bent = [bytes(_bent(rng, one)) if rng.random() < 0.5 else one for one in listings]
            root = rng.choice([code.tree.root, *map(digest_of, bent)])
            found = receive(to, root)
            if isinstance(found, KeptTree):
                found.release()
                continue
            try:
                _, contents = found.offer(bent)
                for _ in range(10):
                    kind, digest = rng.choice([*contents, ("f", rng.randbytes(32))])
                    found.put(kind, digest, rng.choice([0, 0, 1, -1, 1 << 40]), rng.randbytes(rng.randrange(9)))
                found.finish().release()
            except TreeError:
                refused += 1
                found.abandon()
        assert refused > 200
        assert os.listdir(tmp_path / "outer") == ["cache"]
        assert sorted(os.listdir(tmp_path / "outer" / "cache")) == ["code"]
        assert os.listdir(to.incoming) == []


def _bent(rng: random.Random, data: bytes) -> bytearray:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return changed


class TestChangedOnDisk:
    """A tree in which a process wrote, as root can, is not used again."""

    def changed(self, tmp_path: Path) -> tuple[KeptTree, Path]:
        root = write(tmp_path / "code", FILES)
        kept, _ = send(store(tmp_path / "cache"), snapshot(root))
        path = Path(kept.path, "pkg", "mod.py")
        path.chmod(0o644)
        path.write_text("b = 9")  # of the same size
        return kept, root

    def test_it_is_received_again(self, tmp_path):
        kept, root = self.changed(tmp_path)
        kept.release()
        again, sent = send(store(tmp_path / "cache"), snapshot(root))
        assert sent == ["pkg/mod.py"]
        assert content(again.path) == content(root)

    def test_while_it_is_used_the_launch_is_told(self, tmp_path):
        kept, root = self.changed(tmp_path)
        with pytest.raises(StoreError, match=r"was changed after it was received \(pkg/mod.py\), and processes use it"):
            send(store(tmp_path / "cache"), snapshot(root))
        kept.release()

    def test_tree_that_was_removed_by_hand_is_received_again_while_it_is_used(self, tmp_path):
        root = write(tmp_path / "code", FILES)
        to = store(tmp_path / "cache")
        used, _ = send(to, snapshot(root))
        subprocess.run(["rm", "-rf", used.path], check=True)
        found: list[tuple[KeptTree, list[str]]] = []
        thread = threading.Thread(target=lambda: found.append(send(to, snapshot(root))), daemon=True)
        thread.start()
        thread.join(pace.PATIENCE_S)
        ((again, _),) = found
        assert content(again.path) == content(root)
        used.release()
        assert locks.take(again.path, wait=False) is None, "the new users have the lock"

    def test_content_that_a_crash_of_the_machine_lost_is_found(self, tmp_path, monkeypatch):
        root = write(tmp_path / "code", FILES)
        kept, _ = send(store(tmp_path / "cache"), snapshot(root))
        path = Path(kept.path, "pkg", "mod.py")
        path.chmod(0o644)
        path.write_bytes(bytes(5))
        os.utime(path, (store_module.STAMP_S, store_module.STAMP_S))
        kept.release()
        monkeypatch.setattr(store_module, "_boot", [2e10])  # later than the last use
        again, _ = send(store(tmp_path / "cache"), snapshot(root))
        assert content(again.path) == content(root)


class TestTrim:
    def sent(self, tmp_path: Path, count: int, **settings: int) -> tuple[store_module.CodeStore, list[KeptTree]]:
        to = store(tmp_path / "cache", **settings)
        trees = []
        for number in range(count):
            root = write(tmp_path / str(number), {"a.bin": bytes([number]) * 1000, "same.bin": bytes(500)})
            trees.append(send(to, snapshot(root))[0])
            os.utime(f"{trees[-1].path}.lock", (number + 1, number + 1))
        return to, trees

    def test_longest_unused_trees_go_until_the_bound_is_met(self, tmp_path):
        to, trees = self.sent(tmp_path, 4, cache_bytes=2600)
        for tree in trees:
            tree.release()
        assert to.trim() == [trees[0].root.hex(), trees[1].root.hex()]
        assert {Path(tree.path).exists() for tree in trees[2:]} == {True}
        assert not any(name.startswith(trees[0].root.hex()) for name in os.listdir(to.trees))
        assert sum(os.path.getsize(os.path.join(to.objects, name)) for name in os.listdir(to.objects)) == 2500

    def test_tree_in_use_stays(self, tmp_path):
        to, trees = self.sent(tmp_path, 3, cache_bytes=0)
        trees[1].release()
        assert to.trim() == [trees[1].root.hex()]
        assert content(trees[0].path).keys() == {"a.bin", "same.bin"}

    def test_tree_with_results_of_workers_stays(self, tmp_path, caplog):
        to, trees = self.sent(tmp_path, 1, cache_bytes=0)
        os.chmod(trees[0].path, 0o755)
        Path(trees[0].path, "checkpoint.pt").write_text("weeks of work")
        trees[0].release()
        assert to.trim() == []
        assert Path(trees[0].path, "checkpoint.pt").read_text() == "weeks of work"
        assert "workers wrote checkpoint.pt" in caplog.text

    def test_nothing_is_removed_while_a_tree_is_received(self, tmp_path):
        to, trees = self.sent(tmp_path, 1, cache_bytes=0)
        trees[0].release()
        begun = receiving(receive(to, bytes(32)))
        assert to.trim() == []
        begun.abandon()
        assert to.trim() == [trees[0].root.hex()]

    def test_what_a_killed_process_left_is_removed(self, tmp_path):
        to, _ = self.sent(tmp_path, 1)
        write(Path(to.incoming), {"dead/tree/a.py": "x", "dead/half": "y"})
        os.chmod(Path(to.incoming, "dead", "tree"), 0o555)
        to.trim()
        assert os.listdir(to.incoming) == []


def test_directory_of_another_user_is_refused(tmp_path):
    if os.getuid():
        pytest.skip("only root can give a directory away")
    os.makedirs(tmp_path / "cache")
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(Exception, match="belongs to user 12345"):
        store(tmp_path / "cache")
