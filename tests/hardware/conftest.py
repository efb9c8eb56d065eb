"""A fake NVML, and registries that a test may fill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pace
import pytest

from rlinf_actors import procfs
from rlinf_actors.hardware import extensions, registry
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.hardware.vendors import catalog
from rlinf_actors.model import accelerator_table, hardware

SOURCE = Path(__file__).with_name("fake_nvml.c")
Probe = Callable[..., Awaitable[ProbeReport]]


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a libnvidia-ml.so.1 that answers as FAKE_NVML_* in the environment say."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the fake NVML")
    directory = tmp_path_factory.mktemp("nvml")
    library = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return directory


@pytest.fixture
def nvml_environ(fake_nvml: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(fake_nvml)}


@pytest.fixture
def probe(nvml_environ: dict[str, str]) -> Probe:
    """Probe this machine with the fake NVML; keyword arguments are FAKE_NVML_MODE, _DEVICES or whole variables."""

    async def run(
        mode: str = "", devices: str | None = None, timeout_s: float = pace.PATIENCE_S, **env: str
    ) -> ProbeReport:
        environ = {**nvml_environ, "FAKE_NVML_MODE": mode, **env}
        if devices is not None:
            environ["FAKE_NVML_DEVICES"] = devices
        return await run_probe(timeout_s=timeout_s, env=environ)

    return run


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries of this test's own."""
    monkeypatch.setattr(registry, "_hardware", {})
    monkeypatch.setattr(registry, "_configs", {})
    monkeypatch.setattr(extensions, "_loaded", {})
    monkeypatch.setattr(extensions, "_scanned", set())
    monkeypatch.setattr(catalog, "_registered", {})
    monkeypatch.setattr(hardware, "_registered", set())
    monkeypatch.setattr(accelerator_table, "_owners", {})
    rows = dict(accelerator_table._rows)
    yield
    accelerator_table._rows.clear()
    accelerator_table._rows.update(rows)


@pytest.fixture(autouse=True)
def forgets_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The modules in which a test writes extensions are gone after it."""
    before, place = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if place in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No child process and no descriptor more than before."""
    before = _held()
    yield
    assert _held() == before


def _held() -> Any:
    return sorted(procfs.children(os.getpid())), sorted(os.listdir("/proc/self/fd"))
