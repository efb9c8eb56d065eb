"""Code of the child processes of the probe and of agentd's hardware query. These processes may hang or crash.

`child_process.run_child` starts them. `main` queries one vendor or loads one extension; `enumerate_main` calls one
hardware type. Each writes one JSON object to standard output and ends the process without clean-up, which could hang.
Output of the vendor's library goes to standard error; the parent shows its last line if the child dies. The interpreter
is the one of the node group and may lack msgspec, so this module imports only the standard library until it has checked
that.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion

EXTENSION = "extension"
_MAX_OUTPUT_BYTES = 64 << 20
"""Limit of a child's output. The parent's files for it are in memory, which an endless output would fill."""


def main(argv: list[str]) -> None:
    """Query one vendor, or load one extension, and write the fields of a probe.ChildReport to standard output.

    Args:
        argv: three texts. The first is the parent's pid. The second is the accelerator type to query, or "extension".
            The third is an Extension as JSON: the extension to load, or the extension that registers the accelerator
            type; left out if that type is built in.
    """
    answer, what = contain(int(argv[0])), argv[1]
    try:
        result = _extension(argv[2]) if what == EXTENSION else _vendor(what, argv[2:])
    except Exception as error:  # noqa: BLE001 - the parent reports it as a fault of this vendor
        result = {"faults": [_describe(error)]}
    finish(answer, json.dumps(result).encode())


def contain(parent: int) -> int:
    """Prepare this process to run code that may misbehave.

    From now on, this process is killed when process *parent* ends, dumps no core, and writes no file of more than 64
    MiB. Standard output goes to standard error, so that output of the code does not mix with the answer. Return the
    descriptor to which the process then writes its answer.
    """
    from rlinf_actors import procfs

    procfs.die_with_parent(signal.SIGKILL, parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_OUTPUT_BYTES, most))
    import faulthandler

    faulthandler.enable()
    answer = os.dup(1)
    os.dup2(2, 1)
    return answer


def finish(answer: int, data: bytes) -> NoReturn:
    """Write *data* to the descriptor *answer* and exit the process at once, without clean-up."""
    os.write(answer, data)
    sys.stderr.flush()
    os._exit(0)


def _vendor(kind: str, extensions: list[str]) -> dict[str, Any]:
    from rlinf_actors.hardware.vendors.catalog import FoundAccelerators, vendor_of

    if extensions:  # a built-in vendor has none: its child starts without the modules that load them
        _load(extensions)
    vendor = vendor_of(kind)
    if vendor is None:
        raise LookupError(f"no vendor of {kind} is registered in the probe's process")
    find = vendor.find or importlib.import_module(vendor.module).find
    found = find(os.environ)
    if not isinstance(found, FoundAccelerators):
        given = type(found).__name__
        raise TypeError(f"find() of {find.__module__} returned {given}; it must return FoundAccelerators")
    return {"infos": [vars(info) for info in found.infos], "faults": [str(fault) for fault in found.faults]}


def measure_main(argv: list[str]) -> None:
    """Write what the accelerators of a built-in vendor do now, and for whom, in the form that `main` writes.

    Args:
        argv: the parent's pid, and the accelerator type.
    """
    answer = contain(int(argv[0]))
    try:
        from rlinf_actors.hardware.vendors.catalog import vendor_of

        vendor = vendor_of(argv[1])
        module = importlib.import_module(vendor.module if vendor is not None else "")
        found = getattr(module, "measure", module.find)(os.environ)
        result = {"infos": [vars(info) for info in found.infos], "faults": found.faults}
        try:
            result["held"] = module.holders() if hasattr(module, "holders") else []
        except Exception as error:  # noqa: BLE001 - some drivers do not say it; the other figures are good
            result["faults"] = [*found.faults, _describe(error)]
    except Exception as error:  # noqa: BLE001 - the parent shows no figures then
        result = {"faults": [_describe(error)]}
    finish(answer, json.dumps(result).encode())


def holders_main(argv: list[str]) -> None:
    """Write which processes hold memory of a vendor's accelerators, as a JSON object with `held` and `faults`.

    Args:
        argv: the parent's pid, and the accelerator type, whose module has a function ``holders``.
    """
    answer = contain(int(argv[0]))
    try:
        from rlinf_actors.hardware.vendors.catalog import vendor_of

        vendor = vendor_of(argv[1])
        held = importlib.import_module(vendor.module if vendor is not None else "").holders()
        result = {"held": held}
    except Exception as error:  # noqa: BLE001 - the parent reports it as a fault of this vendor
        result = {"faults": [_describe(error)]}
    finish(answer, json.dumps(result).encode())


def _extension(name: str) -> dict[str, Any]:
    from rlinf_actors.hardware.registry import registered_types
    from rlinf_actors.hardware.vendors.catalog import registered_vendors
    from rlinf_actors.hardware.vendors.machine import Machine

    _load([name])
    machine = Machine(os.environ)
    present = {str(row.kind): row.module for row in registered_vendors() if row.may_be_present(os.environ, machine)}
    return {"types": registered_types(), "vendors": present}


def _load(extensions: list[str]) -> None:
    from rlinf_actors.hardware.extensions import load
    from rlinf_actors.wire.values import Extension

    for text in extensions:
        load(Extension(**json.loads(text)))


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "pynvml":
        return f"nvidia-ml-py is not installed for {sys.executable}; NVIDIA's devices cannot be read"
    from rlinf_actors.errors import ConfigError

    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def enumerate_main(argv: list[str]) -> None:
    """Read a HardwareQuestion from standard input, find the pieces of its hardware type, and write a HardwareAnswer.

    Args:
        argv: the parent's pid; then "described" if the hardware of this node is only a description, else "real".
    """
    answer = contain(int(argv[0]))
    try:
        msgspec = importlib.import_module("msgspec")
    except ImportError as error:
        python = f"interpreter {sys.executable}"
        text = f"{python} has no msgspec ({error}): run '{sys.executable} -m pip install msgspec'"
        finish(answer, json.dumps({"kind": "failed", "text": text}).encode())
    from rlinf_actors.wire.values import HardwareQuestion

    question = msgspec.json.decode(sys.stdin.buffer.read(), type=HardwareQuestion)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path += [entry for entry in question.sys_path if entry not in sys.path and os.path.isdir(entry)]
    finish(answer, msgspec.json.encode(ask_type(question, argv[1] == "described")))


def ask_type(question: HardwareQuestion, described: bool) -> HardwareAnswer:
    """Load the extensions that register the hardware type of *question*. Return the pieces of that type, or an error.

    Runs user code. *described* is True if the hardware of this node is only a description.
    """
    from rlinf_actors.errors import ConfigError
    from rlinf_actors.hardware.configured import enumerate_values, piece_of
    from rlinf_actors.hardware.extensions import is_known, load_for
    from rlinf_actors.hardware.registry import hardware_classes
    from rlinf_actors.settings import EXT_MODULE
    from rlinf_actors.wire.values import HardwareAnswer

    faults = load_for(question.type, question.extensions, os.environ.get(EXT_MODULE))
    if not is_known(question.type) or not hardware_classes(question.type):
        return HardwareAnswer(kind="unregistered", text="; ".join(faults))
    try:
        found = enumerate_values(question.type, question.node_rank, json.loads(question.configs), described=described)
    except ConfigError as error:
        return HardwareAnswer(kind="config", text=str(error.args[0]), path=error.path)
    return HardwareAnswer([piece_of(info) for info in found.infos] if found is not None else [])
