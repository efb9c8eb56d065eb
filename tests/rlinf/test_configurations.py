"""Every configuration file of RLinf with a ``cluster:`` section is read and planned, and RLinf's own check runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlinf_actors.cli.main import main
from rlinf_actors.cluster.cluster_nodes import read_config
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.config.config_values import parse_yaml
from rlinf_actors.errors import ConfigError
from rlinf_actors.placement.component import ComponentPlacement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.plan import plan
from tests.rlinf.checkout import NEEDS_SOURCE, SOURCE

pytestmark = NEEDS_SOURCE

WRONG = {
    # RLinf refuses it too: "node_rank 0 in hardware config must be within node_ranks [1, 2] in node group 'franka'"
    "examples/embodiment/config/realworld_dual_franka_dagger_openpi.yaml": "must be within node_ranks",
}
"""Files that RLinf itself refuses, and the words of the error."""


SECTION = re.compile(r"^cluster:.*\n(?:(?:[ \t#].*)?\n)*", re.MULTILINE)


def sections() -> dict[str, str]:
    """Return the text of each ``cluster:`` section of RLinf's examples and tests, by the file's name.

    The rest of the files, which Hydra composes with others, takes long to load.
    """
    assert SOURCE is not None
    paths = [path for folder in ("examples", "tests") for path in sorted((SOURCE / folder).rglob("*.yaml"))]
    found = {str(path.relative_to(SOURCE)): SECTION.search(path.read_text() + "\n") for path in paths}
    return {name: section[0] for name, section in found.items() if section is not None}


def described(config: ClusterConfig) -> DescribedCluster:
    """Return nodes on which the file can run: as many as it names, with eight accelerators and its robots."""
    nodes = [{"count": config.num_nodes, "accelerator": {"type": "NV_GPU", "number": 8}}]
    return DescribedCluster.from_any(nodes, config)


@pytest.mark.timeout(300)
def test_every_file_is_read_and_planned() -> None:
    faults: dict[str, str] = {}
    read = sections()
    for name, text in read.items():
        try:
            section = parse_yaml(text)
            config = read_config(section)
            as_rlinf_has_it = OmegaConf.create(section)
            assert read_config(as_rlinf_has_it.cluster) == config
            cluster = described(config)
            assert plan(config, cluster).to_dict()["components"]
            placement = ComponentPlacement(as_rlinf_has_it, cluster)
            for component in placement.components:
                placements = placement.get_strategy(component).get_placement(cluster)
                assert len(placements) == placement.get_world_size(component) > 0
        except ConfigError as error:
            faults[name] = str(error)
    assert len(read) > 300
    assert set(faults) == set(WRONG), faults
    for name, words in WRONG.items():
        assert words in faults[name]


def test_the_command_plans_a_file_with_robots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SOURCE is not None
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{count: 2, accelerator: {type: NV_GPU, model: '4090', number: 1}}]\n")
    conf = SOURCE / "examples/embodiment/config/realworld_charger_sac_cnn_async.yaml"
    assert main(["plan", str(conf), "--describe", str(nodes)]) == 0
    assert "franka" in capsys.readouterr().out


PROGRAM = """
import os, sys
from hydra import compose, initialize_config_dir
from rlinf.config import validate_cfg
from rlinf.scheduler import Cluster
with initialize_config_dir(config_dir=sys.argv[1], version_base="1.3"):
    cfg = compose(config_name=sys.argv[2])
cfg.runner.logger.log_path = sys.argv[3]
checked = validate_cfg(cfg)
assert checked.cluster.tracer == {"enable": False}
assert Cluster().config.tracer.enable is False
print("checked", Cluster().num_nodes)
"""


@pytest.mark.live
@pytest.mark.torch
def test_rlinfs_check_of_a_configuration_starts_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    assert SOURCE is not None
    script = tmp_path / "check.py"
    script.write_text(PROGRAM)
    embodied = SOURCE / "examples" / "embodiment"
    env = {**os.environ, "EMBODIED_PATH": str(embodied), "PYTHONPATH": str(SOURCE)}
    command = ["-m", "rlinf_actors.dropin", str(script), str(embodied / "config"), "maniskill_ppo_mlp", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "checked 1" in done.stdout
