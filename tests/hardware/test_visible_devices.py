"""A user's CUDA_VISIBLE_DEVICES, from where it is set to the workers: real agentd, probe and workers, a fake NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

DEVICES = "A800,GPU-1a,81920;RTX 4090,GPU-1b,24576;H100,GPU-2c,81920;H20,GPU-3d,98304"
"""Four models, so that a worker on the wrong one cannot look right."""

DRIVER = """
    import json, os, sys
    import pynvml
    from rlinf_actors import Cluster, PackedPlacementStrategy, Worker
    from rlinf_actors.errors import ConfigError, PlacementError

    class Looker(Worker):
        def look(self):
            # As CUDA does it: the numbers are the driver's, in the order that CUDA_DEVICE_ORDER asks for.
            pynvml.nvmlInit()
            names = []
            for number in filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(",")):
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(number))
                names.append(pynvml.nvmlDeviceGetName(handle))
            return {
                "sees": names,
                "told": [self._accelerator_model, self.worker_info.accelerator_model],
                "order": os.environ.get("CUDA_DEVICE_ORDER"),
            }

    asked = json.loads(sys.argv[1])
    try:
        with Cluster(cluster_cfg=asked.get("config"), num_nodes=None if asked.get("config") else 1) as cluster:
            strategy = PackedPlacementStrategy(0, asked["last"], node_group=asked.get("group"))
            group = Looker.create_group().launch(cluster, strategy, env_vars=asked.get("env"))
            result = {"workers": group.look().wait(60), "faults": []}
    except (ConfigError, PlacementError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(result))
"""


@pytest.fixture
def look(fake_nvml: Path, tmp_path: Path) -> Any:
    """Launch one worker per device up to rank `last`; says what each sees, or the error."""

    def run(last: int, agentd_env: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
        script = tmp_path / "driver.py"
        script.write_text(textwrap.dedent(DRIVER))
        config = tmp_path / "agentd.toml"
        config.write_text("[node]\nenv = {" + ", ".join(f'{k} = "{v}"' for k, v in (agentd_env or {}).items()) + "}\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "CUDA_"))}
        env = {
            **clean,
            "LD_LIBRARY_PATH": str(fake_nvml),
            "FAKE_NVML_DEVICES": DEVICES,
            "RLINF_ACTORS_CONFIG": str(config),
            **asked.pop("node_env", {}),
        }
        done = subprocess.run(
            [sys.executable, str(script), json.dumps({"last": last, **asked})],
            env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        return dict(json.loads(line.removeprefix("RESULT ")))

    return run


def group(variables: dict[str, str]) -> dict[str, Any]:
    entries = [{"node_ranks": 0, "env_vars": [{name: value} for name, value in variables.items()]}]
    return {"num_nodes": 1, "node_groups": [{"label": "g", "node_ranks": 0, "env_configs": entries}]}


def devices(*names: str) -> list[dict[str, Any]]:
    return [{"sees": [name], "told": [name, name], "order": "PCI_BUS_ID"} for name in names]


@pytest.mark.parametrize(
    ("where", "value"), [("environment", "2,1"), ("environment", "GPU-2c,GPU-1b"), ("agentd.toml", "GPU-2,1")]
)
def test_on_the_node(look: Any, where: str, value: str) -> None:
    given = {"CUDA_VISIBLE_DEVICES": value}
    found = look(1, **({"node_env": given} if where == "environment" else {"agentd_env": given}))
    assert found["workers"] == devices("H100", "RTX 4090")


def test_in_a_node_group(look: Any) -> None:
    found = look(1, group="g", config=group({"CUDA_VISIBLE_DEVICES": "3,GPU-1a"}))
    assert found["workers"] == devices("H20", "A800")


def test_in_a_node_group_of_a_node_that_hides_some(look: Any) -> None:
    found = look(
        0, group="g", config=group({"CUDA_VISIBLE_DEVICES": "3"}), node_env={"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-3"}
    )
    assert found["workers"] == devices("H20")


def test_the_order_of_the_node(look: Any) -> None:
    found = look(0, node_env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"})
    assert found["workers"] == devices("RTX 4090")


def test_an_order_that_would_show_other_devices(look: Any) -> None:
    config = group({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    error = look(0, group="g", config=config)["error"]
    assert error.startswith(
        "ConfigError: cluster.node_groups[0].env_configs[0].env_vars.CUDA_DEVICE_ORDER: is 'FASTEST_"
    )
    assert look(1, node_env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})["workers"] == devices("A800", "RTX 4090")


def test_a_group_against_its_node(look: Any) -> None:
    config = group({"CUDA_VISIBLE_DEVICES": "0,3"})
    error = look(0, group="g", config=config, node_env={"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-1b"})["error"]
    assert error.startswith("ConfigError: cluster.node_groups[0].env_configs[0].env_vars.CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES=0,3 names 3, which no device that can be read has" in error
    assert "its own settings: CUDA_VISIBLE_DEVICES=GPU-1a,GPU-1b" in error


def test_launch_against_the_placement(look: Any) -> None:
    error = look(0, env={"CUDA_VISIBLE_DEVICES": "1"})["error"]
    assert "launch(env_vars).CUDA_VISIBLE_DEVICES: is '1', but worker 0 was placed on node 0" in error
    assert "CUDA_VISIBLE_DEVICES='0'" in error
    assert look(0, env={"CUDA_VISIBLE_DEVICES": "0"})["workers"] == devices("A800")
