"""The import finder serves rlinf.scheduler from rlinf_actors, whatever else is on sys.path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from rlinf_actors.dropin import door
from rlinf_actors.dropin.table import MODULES, PACKAGES, Absent

CHECKOUT = {  # of RLinf: a package that runs code of its own, and a scheduler that must not be loaded
    "rlinf/__init__.py": "from .utils.more import THEIRS",
    "rlinf/utils/__init__.py": "",
    "rlinf/utils/more.py": "THEIRS = 'theirs'",
    "rlinf/scheduler/__init__.py": "raise RuntimeError('the checkout was loaded')",
    "rlinf/scheduler/newer.py": "raise RuntimeError('the checkout was loaded')",
    "rlinf/scheduler/worker/__init__.py": "raise RuntimeError('the checkout was loaded')",
    "rlinf/scheduler/dynamic_scheduler/__init__.py": "",
    "rlinf/scheduler/dynamic_scheduler/utils.py": "from rlinf.scheduler import Worker\nTHEIRS = 'theirs'",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in CHECKOUT.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


def run(checkout: Path, program: str, *, door: bool = True) -> subprocess.CompletedProcess[str]:
    """Run *program* in an interpreter with the checkout in front of sys.path."""
    script = checkout / "program.py"
    script.write_text(textwrap.dedent(program))
    command = [sys.executable, *(["-m", "rlinf_actors.dropin"] if door else []), str(script)]
    env = {name: value for name, value in os.environ.items() if name != "RLINF_ACTORS_DROPIN"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def check(checkout: Path, program: str) -> str:
    done = run(checkout, program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_place_in_the_table_exists():
    for module, names in MODULES.items():
        for name, place in names.items():
            if isinstance(place, Absent):
                assert place.text, f"{module}.{name}"
                continue
            home, _, attribute = place.partition(":")
            assert hasattr(import_module(f"rlinf_actors.{home}"), attribute), f"{module}.{name}"


def test_a_part_of_rays_machinery_can_be_imported_and_raises_when_it_is_used(checkout):
    check(
        checkout,
        """
        from rlinf.scheduler.collective import CollectiveGroup
        from rlinf.scheduler.manager.manager import Manager
        from rlinf_actors import UsageError
        assert isinstance(Manager, type) and not isinstance(3, CollectiveGroup)
        for use in (lambda: CollectiveGroup(1), lambda: Manager.get_runtime_env_vars()):
            try:
                use()
            except UsageError as error:
                assert "is not served by rlinf_actors: it is a part of how" in str(error), error
            else:
                raise AssertionError("it can be used")
        """,
    )


def test_packages_export_names_that_their_modules_define():
    for package, origins in PACKAGES.items():
        for origin, names in origins.items():
            assert set(names) <= MODULES[origin].keys(), f"{package} from {origin}"


def test_every_form_of_import_gives_the_same_objects(checkout):
    check(
        checkout,
        """
        import rlinf, importlib
        from rlinf.utils.more import THEIRS
        assert rlinf.THEIRS == THEIRS == "theirs"
        import rlinf.scheduler.hardware.accelerators.nvidia_gpu as nvidia_gpu
        from rlinf.scheduler.worker import Worker
        from rlinf.scheduler.worker.worker import Worker as Defined
        from rlinf.scheduler import Worker as Exported, Cluster
        import rlinf.scheduler as scheduler
        import rlinf_actors
        assert Worker is Defined is Exported is scheduler.Worker is rlinf_actors.Worker
        assert rlinf.scheduler.worker.worker.Worker is Worker
        assert importlib.import_module("rlinf.scheduler.cluster.cluster").Cluster is Cluster
        assert nvidia_gpu is scheduler.hardware.accelerators.nvidia_gpu
        namespace = {}
        exec("from rlinf.scheduler import *", namespace)
        assert namespace["Worker"] is Worker
        """,
    )


def test_packages_without_ray_come_from_the_checkout(checkout):
    check(
        checkout,
        """
        from rlinf.scheduler.dynamic_scheduler.utils import THEIRS, Worker
        import rlinf.scheduler
        import rlinf_actors
        assert THEIRS == "theirs" and Worker is rlinf_actors.Worker
        assert rlinf.scheduler.dynamic_scheduler.utils.THEIRS == "theirs"
        try:
            import rlinf.scheduler.dynamic_scheduler.newer
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
        """,
    )
    shutil.rmtree(checkout / "rlinf" / "scheduler" / "dynamic_scheduler")
    done = run(checkout, "import rlinf.scheduler.dynamic_scheduler.utils")
    assert "is used as it is in RLinf's checkout, and is not there" in done.stderr


def test_served_modules_can_be_inspected_and_classes_pickled(checkout):
    check(
        checkout,
        """
        import inspect, pickle
        import rlinf.scheduler
        from rlinf.scheduler import Worker, WorkerAddress
        members = dict(inspect.getmembers(rlinf.scheduler))
        assert members["Worker"] is Worker and inspect.ismodule(members["worker"])
        assert "class Worker" in inspect.getsource(Worker)
        assert inspect.getmodule(Worker).__name__ == "rlinf_actors.worker.worker"
        assert pickle.loads(pickle.dumps(Worker)) is Worker
        address = WorkerAddress("group", 3)
        assert pickle.loads(pickle.dumps(address)) == address
        assert rlinf.scheduler.__spec__.name == "rlinf.scheduler" and rlinf.scheduler.__path__ == []
        """,
    )


def test_a_patch_of_a_defining_module_reaches_its_home_and_ends(checkout):
    check(
        checkout,
        """
        from unittest import mock
        import rlinf.scheduler as package
        import rlinf.scheduler.channel.channel as served
        import rlinf_actors.channel.key_encoding as home
        key = home.DEFAULT_KEY
        with mock.patch("rlinf.scheduler.channel.channel.DEFAULT_KEY", "patched"):
            assert served.DEFAULT_KEY == home.DEFAULT_KEY == "patched"
        assert served.DEFAULT_KEY == home.DEFAULT_KEY == key
        served.DEFAULT_KEY = "set"
        served.DEFAULT_KEY = key
        assert home.DEFAULT_KEY == key
        with mock.patch.object(served, "new", 1, create=True):
            assert served.new == 1
        assert not hasattr(served, "new")
        with mock.patch.object(package, "Worker", 1):
            from rlinf_actors.worker.worker import Worker
            assert Worker != 1
        assert package.Worker is Worker
        """,
    )


def test_unknown_names_and_modules_are_errors_that_say_what_to_do(checkout):
    check(
        checkout,
        """
        import rlinf.scheduler.worker.worker as module
        try:
            module.Nothing
        except AttributeError as error:
            assert "has no rlinf.scheduler.worker.worker.Nothing" in str(error) and "on Ray" in str(error), error
        for statement in ("from rlinf.scheduler import Nothing", "from rlinf.scheduler.worker.worker import Nothing"):
            try:
                exec(statement)
            except ImportError as error:
                assert ".Nothing" in str(error) and "on Ray" in str(error), error
            else:
                raise SystemExit(statement)
        for name in ("rlinf.scheduler.newer", "rlinf.scheduler.worker.newer"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                assert name in str(error) and "on Ray" in str(error), error
            else:
                raise SystemExit(name)
        """,
    )


def test_a_scheduler_imported_before_the_door_is_an_error(checkout):
    (checkout / "rlinf/scheduler/__init__.py").write_text("")
    done = run(
        checkout,
        """
        import rlinf.scheduler
        import rlinf_actors.dropin
        rlinf_actors.dropin.install()
        """,
        door=False,
    )
    assert done.returncode == 1
    assert "before rlinf_actors.dropin was installed" in done.stderr
    assert str(checkout / "rlinf/scheduler/__init__.py") in done.stderr


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_by_multiprocessing_have_the_door(checkout, method):
    said = check(
        checkout,
        f"""
        import multiprocessing
        def child(queue):
            from rlinf.scheduler.worker import Worker
            queue.put(Worker.__module__)
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(queue.get(timeout=30))
            process.join()
        """,
    )
    assert said.strip() == "rlinf_actors.worker.worker"


def test_children_by_subprocess_have_the_door_and_their_own_sitecustomize(checkout, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import sys; sys.ran_theirs = True")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    said = check(
        checkout,
        """
        import subprocess, sys
        inner = "import sys; sys.path.insert(0, sys.argv[1]); import rlinf.scheduler.worker as w, sitecustomize; " \\
            "print(w.Worker.__module__, sys.ran_theirs, sitecustomize.__file__.endswith('theirs/sitecustomize.py'))"
        print(subprocess.check_output([sys.executable, "-c", inner, sys.path[0]], text=True))
        """,
    )
    assert said.split() == ["rlinf_actors.worker.worker", "True", "True"]


def test_the_first_entry_of_pythonpath_stays_the_first(checkout):
    said = check(
        checkout,
        """
        import os, subprocess, sys
        os.environ["PYTHONPATH"] = "/other/rlinf_actors/dropin/site" + os.pathsep + "/theirs"
        import rlinf_actors.dropin
        rlinf_actors.dropin.install()
        rlinf_actors.dropin.install()
        print(os.environ["PYTHONPATH"])
        """,
    )
    first, site = said.strip().split(os.pathsep)
    assert first == "/theirs"
    assert site.endswith("dropin/site")


def test_the_module_of_rlinf_ext_module_is_registered(checkout):
    (checkout / "extension.py").write_text("calls = []\ndef register(): calls.append(1)\n")
    check(
        checkout,
        """
        import os
        from rlinf.scheduler.cluster import load_user_extension_module
        load_user_extension_module()
        os.environ["RLINF_EXT_MODULE"] = "extension"
        load_user_extension_module()
        import extension
        assert extension.calls == [1]
        """,
    )


def test_without_rlinf_actors_the_original_scheduler_is_never_imported_by_mistake(checkout):
    program = """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name == "rlinf_actors.dropin.door":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Missing())
        import rlinf_actors_gate
        rlinf_actors_gate.set_up()
        for name in ("ray", "rlinf.scheduler", "rlinf.scheduler"):
            try:
                __import__(name)
            except Exception as error:
                print(type(error).__name__, str(error)[:41])
            else:
                print(name, "was imported")
    """
    (checkout / "ray").mkdir()
    (checkout / "ray" / "__init__.py").touch()
    script = checkout / "program.py"
    script.write_text(textwrap.dedent(program))
    env = {**os.environ, "RLINF_ACTORS_DROPIN": "1", "PYTHONPATH": str(door.SITE)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    refused = "ImportError RLINF_ACTORS_DROPIN is 1, so rlinf_actors"
    assert done.stdout.splitlines() == ["ray was imported", refused, refused], done.stderr
