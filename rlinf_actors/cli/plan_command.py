"""`rlinf-actors plan CONF`: print where a configuration's components would run, without starting anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click
from msgspec.structs import replace

from rlinf_actors.cli.output import echo, json_option, note, show_json, warn
from rlinf_actors.cli.queries import fetch_status, find_head, head_option, observing
from rlinf_actors.cli.routes_view import Routes
from rlinf_actors.cluster.cluster_nodes import ANSWER_S, ask_nodes, node_infos
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ClusterTimeoutError, ConfigError
from rlinf_actors.hardware.configured import describe_hardware
from rlinf_actors.hardware.extensions import load_module
from rlinf_actors.hardware.probe_report import accelerator_type_of
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.net.discovery import client_settings
from rlinf_actors.placement.described import DescribedCluster, parse_description
from rlinf_actors.placement.node_order import RegisteredNode, missing_ranks, order_nodes
from rlinf_actors.placement.plan import plan as make_plan
from rlinf_actors.plurals import counted
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import Enumerated, EnumerateHardware, Status
from rlinf_actors.wire.protocol import expected
from rlinf_actors.wire.values import NodeState


@click.command()
@click.argument("conf", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--describe",
    type=click.Path(exists=True, dir_okay=False),
    help="A YAML file that describes the nodes; default: the nodes of the running cluster.",
)
@click.option(
    "--routes",
    metavar="FROM,TO",
    multiple=True,
    help="Print instead which ranks of component FROM send which elements of a batch to which ranks of TO.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Elements of that batch; default: as few as can be.")
@head_option
@json_option
def plan(
    conf: str, describe: str | None, routes: tuple[str, ...], batch_size: int | None, head: str | None, as_json: bool
) -> None:
    """Print where the components of CONF would run: on the cluster, or on the nodes that a file describes.

    \b
    A description looks like this:
      nodes:
        - {count: 8, ip: 10.0.0.1, accelerator: {type: NV_GPU, model: A800, number: 8}}
        - {count: 2, ip: 10.0.1.1, robots: [{type: Franka}]}
    """  # noqa: D301 - \b is click's mark for text that is not to be wrapped
    settings = client_settings()
    if settings.ext_module:
        load_module(settings.ext_module)
    config = ClusterConfig.from_any(conf)
    if describe is None:
        cluster = _real(config, head, settings)
    else:
        cluster = DescribedCluster(describe_hardware(config, parse_description(describe)), config)
    planned = make_plan(config, cluster)
    for text in planned.closed:
        warn(f"this would be refused: {text}")
    if routes:
        found = [Routes(planned, pair, batch_size) for pair in routes]
        if as_json:
            show_json([one.to_dict() for one in found])
            return
        for one in found:
            one.show()
        return
    if as_json:
        show_json(planned.to_dict())
    else:
        echo(planned.render(), nl=False)


def _real(config: ClusterConfig, head: str | None, settings: Settings) -> DescribedCluster:
    try:
        endpoint = find_head(head, settings)
    except ConfigError as error:
        raise ConfigError(f"{error}; or describe the nodes in a file: --describe FILE (see --help)") from None
    found = fetch_status(endpoint, settings)
    states = ranked(found)
    missing = missing_ranks({state.report.node_id: state.rank for state in states}, config.num_nodes)
    if missing:
        raise ClusterTimeoutError(
            f"{config.num_nodes - len(missing)} of {counted(config.num_nodes, 'node')} registered; missing "
            f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}. Start agentd on them, or describe the "
            f"nodes in a file: --describe FILE",
            missing_ranks=missing,
        )
    if any(state.rank < 0 for state in found.nodes):
        note("node ranks are not fixed yet: shown as they would be if a driver connected now")
    states = [state for state in states if state.rank < config.num_nodes]
    if any(group.hardware is not None for group in config.node_groups):
        return DescribedCluster(_fetch_hardware(endpoint, settings, config, states), config)
    return DescribedCluster(node_infos(states), config)


def _fetch_hardware(
    endpoint: str, settings: Settings, config: ClusterConfig, states: Sequence[NodeState]
) -> list[NodeInfo]:
    """Return the nodes of *states* with the hardware that *config* configures for them. The head at *endpoint* asks
    each node which of that hardware the node has. Blocks.
    """

    async def ask() -> list[NodeInfo]:
        async with observing(endpoint, settings) as client:

            async def request(asked: EnumerateHardware) -> Enumerated:
                return expected(await client.request(asked, ANSWER_S), Enumerated)

            return await ask_nodes(config, states, request)

    return asyncio.run(ask())


def ranked(found: Status) -> list[NodeState]:
    """Return the nodes of the cluster on which workers can be placed. A node without a rank gets the rank that it would
    have if a driver connected now.
    """
    usable = [node for node in found.nodes if node.state in ("ready", "suspect")]
    fixed = {node.report.node_id: node.rank for node in found.nodes if node.rank >= 0}
    registered = [
        RegisteredNode(report.node_id, report.rank, node.is_head, accelerator_type_of(report.resources), report.ip)
        for node, report in ((node, node.report) for node in usable)
    ]
    ranks = order_nodes(registered, fixed, complete=False)
    return [replace(node, rank=ranks[node.report.node_id]) for node in usable]
