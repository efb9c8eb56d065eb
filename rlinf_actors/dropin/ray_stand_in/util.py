"""Stands in for `ray.util`."""

from typing import NoReturn

from rlinf_actors.dropin.ray_names import get_node_ip_address as get_node_ip_address


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"ray.util.{name}: Ray is not installed here, and the stand-in of rlinf_actors.dropin has only "
        f"ray.util.get_node_ip_address and ray.util.queue. Install ray for programs that need more of it"
    )
