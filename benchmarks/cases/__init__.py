"""The cases, one module each. A case uses a backend only by `benchmarks.model.Runtime`."""

from benchmarks.cases import (
    broadcast,
    cluster_start,
    deaths,
    echo_numpy,
    fan_out,
    first_call,
    first_call_torch,
    idle_memory,
    import_time,
    in_flight,
    messages,
    one_call,
    queues,
    transfers,
    transfers_lane,
    transfers_tcp,
)

_ONE_EACH = [
    module.CASE
    for module in (
        import_time,
        cluster_start,
        first_call,
        first_call_torch,
        idle_memory,
        one_call,
        in_flight,
        fan_out,
        echo_numpy,
        messages,
        transfers,
        transfers_lane,
        transfers_tcp,
        broadcast,
        queues,
    )
]
CASES = {case.name: case for case in (*_ONE_EACH, deaths.WORKER, deaths.DRIVER)}
