"""The sections of the cluster configuration that have a dataclass of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.config.small_sections import AutoSchedulerConfig
from rlinf_actors.errors import ConfigError


def config(**keys: Any) -> ClusterConfig:
    return ClusterConfig.from_any({"num_nodes": 1, **keys})


def test_sections_that_are_not_given_are_none() -> None:
    found = config()
    assert (found.tracer, found.profiling, found.net_emulation, found.runtime) == (None, None, None, None)
    assert found.scheduling == AutoSchedulerConfig(False, False, False, False)


def test_every_section_is_kept() -> None:
    found = config(
        tracer={"enable": True, "output_file": "trace.json"},
        profiling={"backend": "nsight", "worker_groups": ["ActorGroup"], "steps": [1, 2]},
        net_emulation={
            "enabled": True,
            "symmetric": False,
            "crossdc_pairs": [{"src": ["Env:0-3"], "dst": "Actor:0", "delay_ms": 10}],
            "bandwidth_groups": [{"members": ["Env:0-3"], "bandwidth_mbps": 1000}],
        },
        runtime={"working_dir": "/home/me/project"},
        auto_scheduler=True,
        use_pre_process_policy=True,
        use_wait_before_last_iter_policy=True,
        recreate_nccl_groups=True,
    )
    assert found.tracer is not None
    assert found.tracer.enable
    assert found.tracer.output_file == "trace.json"
    assert found.profiling is not None
    assert found.profiling.worker_groups == ["ActorGroup"]
    assert found.net_emulation is not None
    assert found.net_emulation.crossdc_pairs
    assert found.net_emulation.crossdc_pairs[0].delay_ms == 10
    assert found.runtime is not None
    assert found.runtime.working_dir == "/home/me/project"
    assert found.scheduling == AutoSchedulerConfig(True, True, True, True)


@pytest.mark.parametrize(
    ("keys", "path", "text"),
    [
        ({"tracer": {"enabled": True}}, "cluster.tracer.enabled", "did you mean 'enable'"),
        ({"tracer": {"enable": "maybe"}}, "cluster.tracer.enable", "true or false"),
        ({"tracer": True}, "cluster.tracer", "a mapping such as {enable: true}"),
        ({"profiling": {"backend": "nsight", "step": [1]}}, "cluster.profiling.step", "did you mean 'steps'"),
        ({"profiling": {"enabled": True}}, "cluster.profiling.backend", "backend must be specified"),
        (
            {"net_emulation": {"crossdc_pairs": [{"src": "a:0", "dst": "b:0"}]}},
            "cluster.net_emulation.crossdc_pairs[0]",
            "has no delay_ms",
        ),
        ({"runtime": {"max_file_mb": 0}}, "cluster.runtime.max_file_mb", "above 0"),
        ({"runtime": {"excludes": "data/"}}, "cluster.runtime.excludes", "a list"),
        ({"runtime": {"workdir": "."}}, "cluster.runtime.workdir", "did you mean 'working_dir'"),
        ({"auto_scheduler": 1}, "cluster.auto_scheduler", "true or false"),
        ({"auto_schedule": True}, "cluster.auto_schedule", "did you mean 'auto_scheduler'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("cluster") else "",
)
def test_fault_in_a_section_names_key_and_remedy(keys: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**keys)
    assert raised.value.path == path
    assert text in str(raised.value)


def test_what_the_runtime_does_anyway_is_said() -> None:
    assert config(auto_scheduler=True).scheduling.done_anyway() == []
    (sentence,) = config(recreate_nccl_groups=True).scheduling.done_anyway()
    assert sentence.startswith("cluster.recreate_nccl_groups: ")
