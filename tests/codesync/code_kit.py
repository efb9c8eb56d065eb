"""What the tests of code sync share: trees of code on disk, and a transfer without a network."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path

from rlinf_actors.codesync.code_scan import CodeSnapshot, Scanner
from rlinf_actors.codesync.code_store import CodeStore, KeptTree
from rlinf_actors.codesync.places import Places
from rlinf_actors.codesync.receiving import receive
from rlinf_actors.codesync.source import CodeSource
from rlinf_actors.settings import CodeSettings


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def snapshot(root: Path, **more: object) -> CodeSnapshot:
    return Scanner(CodeSource(os.path.realpath(root), **more)).scan()  # type: ignore[arg-type]


def store(place: Path, **settings: int) -> CodeStore:
    made = CodeStore(Places(str(place), CodeSettings(str(place), **settings)))
    made.open()
    return made


def send(to: CodeStore, code: CodeSnapshot, slice_bytes: int = 1 << 20) -> tuple[KeptTree, list[str]]:
    """Send *code* to the store as a driver does; return the tree, and the files whose content travelled."""
    receiving = receive(to, code.tree.root)
    if isinstance(receiving, KeptTree):
        return receiving, []
    missing, contents = receiving.offer([])
    while missing:
        missing, contents = receiving.offer([code.tree.listings[digest] for digest in missing])
    names = {(one.facts.kind, one.facts.digest): name for name, one in code.found.items()}
    sent = []
    for kind, digest in contents:
        data = Path(code.path(names[kind, digest])).read_bytes()
        sent.append(names[kind, digest])
        for offset in range(0, max(1, len(data)), slice_bytes):
            receiving.put(kind, digest, offset, data[offset : offset + slice_bytes])
    return receiving.finish(), sent


def content(root: Path | str) -> dict[str, tuple[bytes, bool]]:
    """Each file below *root*, without Python's caches: its bytes, and whether it is executable."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in Path(root).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def random_files(rng: random.Random, count: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for number in range(count):
        depth = rng.randrange(4)
        path = "/".join([*(f"d{rng.randrange(3)}" for _ in range(depth)), f"f{number}.py"])
        found[path] = rng.randbytes(rng.choice([0, 1, 10, 3000]))
    return found
