"""The stand-in of `ray` has what RLinf uses of Ray beside its scheduler, and gives way to an installed Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

WITHOUT_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")


def run(program: str, **env: str) -> str:
    """Run *program* in an interpreter of its own that serves rlinf.scheduler; return what it prints."""
    command = [sys.executable, "-c", "import rlinf_actors.dropin as d; d.install()\n" + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@WITHOUT_RAY
def test_every_form_of_import_finds_the_stand_in():
    run(
        """
        import sys, ray
        assert ray.is_initialized() is False
        ray.shutdown()
        import ray.util, ray.actor
        from ray.util.queue import Queue, Empty, Full
        import asyncio, queue
        assert issubclass(Empty, (queue.Empty)) and issubclass(Empty, asyncio.QueueEmpty)
        assert issubclass(Full, queue.Full) and issubclass(Full, asyncio.QueueFull)
        from rlinf_actors.dropin.table import RAY_NAMES
        for name in RAY_NAMES:
            place, _, last = f"ray.{name}".rpartition(".")
            assert hasattr(sys.modules[place], last), name
        host = ray.util.get_node_ip_address()
        import ipaddress
        ipaddress.ip_address(host)
        """
    )


@WITHOUT_RAY
def test_other_names_of_ray_are_errors_that_name_them():
    run(
        """
        import importlib.util, ray, ray.util
        for name in ("init", "remote", "get", "util.ActorPool"):
            holder, _, last = ("ray." + name).rpartition(".")
            try:
                getattr(ray.util if "util" in holder else ray, last)
            except AttributeError as error:
                assert f"ray.{name}: Ray is not installed" in str(error), error
            else:
                raise SystemExit(name)
        for statement in ("from ray import init", "import ray.tune", "from ray.util import placement_group"):
            try:
                exec(statement)
            except ImportError as error:
                assert statement.split()[-1] in str(error), error
            else:
                raise SystemExit(statement)
        assert importlib.util.find_spec("ray.tune") is None  # programs ask so whether a part of Ray is there
        """
    )


@WITHOUT_RAY
def test_a_directory_that_is_called_ray_is_not_taken_for_ray(tmp_path):
    (tmp_path / "ray" / "session_latest").mkdir(parents=True)
    assert run("import ray; print(ray.is_initialized())", PYTHONPATH=str(tmp_path)) == "False\n"


def test_an_installed_ray_is_used(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("real = True")
    said = run(
        """
        import ray, importlib.util
        print(ray.real, importlib.util.find_spec("ray.util"))
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert said.split() == ["True", "None"]
