"""User code under type checkers: files of this directory, the examples, and the Python blocks of README.md and docs/.

mypy --strict and pyright each run once over all of them, as over a user's project: in a directory of their own, with
the package as it is installed for this interpreter. mypy takes the options and the cache of
`mypy --cache-dir .venv/mypy`, which CI runs before: without that cache it would read the package and torch once more.

A file of this directory is user code that both accept. In a file called ``wrong_*`` the lines that end with ``# wrong``
are errors for both, and no other line is. A ```python block of a page is checked behind its page's lines in PAGES,
which stand for what the page takes for granted.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
EXAMPLES = sorted(
    path for path in ROOT.joinpath("examples").rglob("*.py") if not path.with_name("__init__.py").exists()
)
PACKAGES = sorted(path.parent for path in ROOT.joinpath("examples").rglob("__init__.py"))
OPTIONAL = {"gymnasium", "lerobot", "torch"}
"""Packages that a file may import and this environment may lack: then the file is left out."""
USER_CODE = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))
PAGES = {
    "README.md": """
        from typing import Any
        from rlinf_actors import Cluster, ComponentPlacement, NodePlacementStrategy, RestartPolicy, Worker
        from README_1 import Greeter
        class Actor(Worker):
            def __init__(self, config: Any = None) -> None: ...
        config: Any = None
        cluster = Cluster()
        def connect(address: str) -> Any: ...
        """,
    "add-hardware.md": """
        from collections.abc import Sequence
        from dataclasses import dataclass
        from typing import Any
        from rlinf_actors import HardwareConfig, HardwareInfo, HardwareResource, Hardware, NodeHardwareConfig, Worker
        def ask(port: str, command: str) -> str:
            raise NotImplementedError
        class Mine(Worker):
            model: Any
        self = Mine()
        """,
    "attach-a-debugger.md": """
        from typing import Any
        from rlinf_actors import Worker as Base
        class Worker(Base):
            model: Any
        """,
    "call-workers.md": """
        import threading
        from collections.abc import AsyncIterator, Iterator
        from typing import Any
        from rlinf_actors import Cluster, WorkerGroup
        from rlinf_actors import Worker as Base
        class Rollout: ...
        class Scorer(Base):
            def score(self, path: str) -> float:
                return 0.0
        paths = iter([""])
        async def arriving() -> AsyncIterator[str]:
            yield ""
        paths_as_they_come = arriving()
        class Worker(Base):
            def rollout(self) -> Rollout:
                raise NotImplementedError
        group: Any = None
        cluster, x = Cluster(), 1.0
        class Sampler(Base):
            def sample(self, n: int) -> list[Rollout]:
                return []
        class Model(Base):
            def __init__(self, version: str) -> None: ...
            def predict(self, x: float) -> float:
                return x
        sampler = Sampler.create_group().launch(cluster)
        """,
    "first-program.md": "",
    "from-ray.md": "",
    "robot-cell.md": "",
    "run-a-program.md": "",
    "train-a-policy.md": """
        from rlinf_actors import NodePlacementStrategy
        from rlinf_actors.testing import LocalCluster
        nodes, workers = 2, 3
        """,
    "robot-safety.md": """
        import subprocess
        from typing import Any
        from rlinf_actors import Worker as Base
        class Worker(Base):
            arm: Any
        def connect(address: str) -> Any: ...
        address = str()
        class Dashboard:
            def __init__(self, address: str) -> None: ...
            def __enter__(self) -> Any: ...
            def __exit__(self, *error: object) -> None: ...
        """,
    "send-messages.md": """
        import multiprocessing
        from typing import Any
        from rlinf_actors import Channel, Worker, WorkerAddress
        class Tensor: ...
        trajectories: Any = None
        states: Any = None
        tasks: Any = None
        """,
    "read-logs.md": "",
    "resize-groups.md": """
        from typing import Any
        from rlinf_actors import Cluster, NodePlacementStrategy, Worker
        class Rollout(Worker):
            def __init__(self, model: Any) -> None: ...
            def step(self) -> None: ...
        cluster, model = Cluster(), None
        """,
    "set-up-robots.md": """
        from typing import Any
        from rlinf_actors import Worker
        def connect(address: str) -> Any: ...
        """,
    "use-gymnasium-lerobot-ros.md": "",
    "share-groups.md": """
        import threading
        from collections.abc import AsyncIterator, Iterator
        from typing import Any
        from rlinf_actors import Cluster, WorkerGroup
        from rlinf_actors import Worker as Base
        class Rollout: ...
        class Scorer(Base):
            def score(self, path: str) -> float:
                return 0.0
        paths = iter([""])
        async def arriving() -> AsyncIterator[str]:
            yield ""
        paths_as_they_come = arriving()
        class Worker(Base):
            def rollout(self) -> Rollout:
                raise NotImplementedError
        group: Any = None
        cluster, x = Cluster(), 1.0
        class Sampler(Base):
            def sample(self, n: int) -> list[Rollout]:
                return []
        class Model(Base):
            def __init__(self, version: str) -> None: ...
            def predict(self, x: float) -> float:
                return x
        sampler = Sampler.create_group().launch(cluster)
        """,
    "share-hardware.md": """
        from collections.abc import Sequence
        from dataclasses import dataclass
        from typing import Any
        from rlinf_actors import HardwareConfig, HardwareInfo, HardwareResource, Hardware, NodeHardwareConfig, Worker
        def ask(port: str, command: str) -> str:
            raise NotImplementedError
        class Mine(Worker):
            model: Any
        self = Mine()
        """,
    "stop-robots.md": """
        import ctypes, subprocess
        from typing import Any
        from rlinf_actors import Worker
        def connect(address: str) -> Any: ...
        address = str()
        class Mine(Worker):
            arm: Any
        self = Mine()
        loop = ctypes.CDLL(None)
        """,
    "survive-failures.md": """
        from pathlib import Path
        from typing import Any
        from rlinf_actors import Cluster, RestartPolicy, Worker
        class Actor(Worker):
            def __init__(self, config: Any) -> None: ...
        class MyWorker(Worker): ...
        config: Any = None
        cluster = Cluster()
        """,
    "test-with-faults.md": "",
    "testing.md": "",
    "trace-a-job.md": """
        from rlinf_actors import Tracer
        def preprocess() -> None: ...
        """,
    "two-machines.md": "",
    "two-nodes.md": "",
    "use-asyncio.md": """
        import asyncio
        from typing import Any
        from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker, WorkerGroup
        class Actor(Worker):
            def step(self) -> int:
                return 1
        class Env(Worker): ...
        cluster, strategy = Cluster(), NodePlacementStrategy([0])
        self = Actor()
        """,
    "use-channels.md": """
        import logging
        from typing import Any
        from rlinf_actors import Channel, ChannelClosedError, Cluster, ItemNotProcessedError, Worker
        class Mine(Worker):
            def run(self, channel: Channel) -> None: ...
        async def process(item: Any) -> None: ...
        cluster, log = Cluster(), logging.getLogger()
        group = Mine.create_group().launch(cluster)
        rollout, channel = "", Channel.create("")
        """,
}
"""By page: what its blocks take for granted. A block that imports rlinf_actors itself is a program and stands alone."""


def blocks() -> dict[str, str]:
    """The ```python blocks of README.md and docs/, as modules by name. A block that says its file may be imported."""
    found: dict[str, str] = {}
    taken = {path.name for path in [*EXAMPLES, *USER_CODE]}
    for page in [ROOT / "README.md", *sorted(ROOT.joinpath("docs").rglob("*.md"))]:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S), 1):
            body, lines = textwrap.dedent(block), textwrap.dedent(PAGES.get(page.name, "")).strip()
            try:
                compile(body, "", "exec")
            except SyntaxError:  # await outside of a coroutine
                body = "async def block() -> None:\n" + textwrap.indent(body, "    ")
            program = re.search(r"^from rlinf_actors.* import", block, re.M)
            said = re.match(r"# (\w+\.py)\n", block)
            name = said[1] if said and said[1] not in taken else f"{page.stem.replace('-', '_')}_{number}.py"
            assert name not in found, f"two blocks are called {name}"
            found[name] = body if program else f"{lines}\n\n{body}"
    return found


BLOCKS = blocks()
_TIMES = Counter(path.name for path in EXAMPLES)
NAMES = [
    *(path.name for path in USER_CODE),
    *(path.name if _TIMES[path.name] == 1 else f"{path.parent.name}_{path.name}" for path in EXAMPLES),
    *BLOCKS,
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all of it."""
    place = tmp_path_factory.mktemp("user")
    for path, name in zip([*USER_CODE, *EXAMPLES], NAMES, strict=False):
        if all(map(importlib.util.find_spec, OPTIONAL & _imported(path.read_text(), path.parent))):
            shutil.copy(path, place / name)
    for package in PACKAGES:
        shutil.copytree(package, place / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in BLOCKS.items():
        if all(map(importlib.util.find_spec, OPTIONAL & _imported(text))):
            place.joinpath(name).write_text(text)
    return place


@pytest.fixture(scope="module")
def refused(project: Path) -> Mapping[str, Mapping[str, dict[int, str]]]:
    """By type checker and file the lines that it refuses, and why."""
    env = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH", "FORCE_COLOR")}
    mypy = [sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}"]
    mypy += [f"--cache-dir={Path(sys.prefix, 'mypy')}", "--no-error-summary", "--hide-error-context", "."]
    pyright = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."]
    with (
        subprocess.Popen(mypy, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one,
        subprocess.Popen(
            pyright, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as two,
    ):
        (by_mypy, mypy_err), (by_pyright, pyright_err) = one.communicate(), two.communicate()
    assert one.returncode in (0, 1), f"{by_mypy}{mypy_err}"
    assert two.returncode in (0, 1), f"{by_pyright}{pyright_err}"
    found: dict[str, dict[str, dict[int, str]]] = {"mypy": defaultdict(dict), "pyright": defaultdict(dict)}
    for file, line, kind, text in re.findall(r"^([^:\n]+):(\d+): (\w+): (.*)$", by_mypy, re.M):
        if kind == "error":
            found["mypy"][file].setdefault(int(line), text)
    report = json.loads(by_pyright)
    for said in report["generalDiagnostics"]:
        file, line = Path(said["file"]).name, said["range"]["start"]["line"] + 1
        found["pyright"][file].setdefault(line, said["message"])
    assert report["summary"]["filesAnalyzed"] >= len(list(project.rglob("*.py")))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(600)  # of the first one, which waits for both
def test_both_type_checkers_accept_right_user_code_and_refuse_wrong(name, project, refused):
    if not project.joinpath(name).exists():
        pytest.skip(f"needs a package that is not installed: one of {', '.join(sorted(OPTIONAL))}")
    lines = project.joinpath(name).read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    for checker, by_file in refused.items():
        unexpected = {
            number: f"{lines[number - 1]}  <- {why}" for number, why in by_file[name].items() if number not in wrong
        }
        assert not unexpected, checker
        assert wrong == set(by_file[name]), f"{checker} accepts what is wrong"


def test_packages_of_examples(refused):
    files = {path.name for package in PACKAGES for path in package.rglob("*.py")}
    assert not [why for by_file in refused.values() for file, why in by_file.items() if Path(file).name in files]


def test_each_page_with_blocks_is_known():
    """A fragment that needs something around it has it in PAGES, above."""
    pages = {
        path.name
        for path in [ROOT / "README.md", *ROOT.joinpath("docs").rglob("*.md")]
        if "```python" in path.read_text()
    }
    assert pages - PAGES.keys() == set()


def _imported(text: str, folder: Path | None = None) -> set[str]:
    """Top-level packages that a module imports, also by modules beside it in its folder."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    beside = [folder / f"{name}.py" for name in found] if folder else []
    return found.union(*(_imported(path.read_text(), folder) for path in beside if path.exists()))
