"""First code that a template's interpreter runs: a short program given to ``python -c`` executes it
(agentd.launch_plan).

With ``python -c``, ``__main__`` has no file. If it had one, multiprocessing would import that file again in the
children of a user's process. Every interpreter must get as far as the error message, so this file uses only old syntax
and imports nothing that may be missing.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable

NEEDED = (("zmq", "pyzmq"), ("msgspec", "msgspec"), ("cloudpickle", "cloudpickle"))
TEMPLATE_FAILED = b"\x82\xa4type\xaeTemplateFailed\xa4text\xda"
"""A TemplateFailed packet in MessagePack, up to the 16-bit length of its text."""


def fail(fd: int, text: str) -> None:
    """Report to agentd over the socket *fd* that this template cannot run, for the reason *text*, and end the process.

    Works without msgspec, which the interpreter may lack.
    """
    data = text.encode("utf-8")[:60000]
    os.write(fd, TEMPLATE_FAILED + len(data).to_bytes(2, "big") + data)
    os._exit(1)


def check(node: str, version: tuple[int, ...], importer: Callable[[str], object], largest: int = sys.maxsize) -> str:
    """Return why this interpreter cannot run workers, and what to do; "" if it can.

    Args:
        node: name of the node, for the text.
        version: the interpreter's version, (major, minor).
        importer: imports a module by its name.
        largest: the interpreter's sys.maxsize.
    """
    who = f"interpreter {sys.executable} on node {node}"
    if version < (3, 10):
        return f"{who} is Python {version[0]}.{version[1]}; workers need Python 3.10 or newer"
    if largest < 1 << 32:  # the lease page is one 64-bit number, read and written at once
        return f"{who} is a 32-bit program; workers need a 64-bit one"
    missing = {}
    for module, package in NEEDED:
        try:
            importer(module)
        except ImportError as error:
            missing[package] = str(error)
    if not missing:
        return ""
    install = f"{sys.executable} -m pip install {' '.join(missing)}"
    return f"{who} has no {', '.join(missing)}: run '{install}' ({'; '.join(missing.values())})"


def bootstrap(pkg: str, fd: str, node: str, config: str) -> None:
    """Start a template: check the interpreter, then run `template.main`. If the check fails, report to agentd and end.

    Args:
        pkg: the directory that contains the package rlinf_actors.
        fd: number of the socket to agentd.
        node: name of the node, for errors.
        config: the template's configuration as JSON.
    """
    gc.disable()  # imports leave little garbage; the worker's process enables it again
    sys.path[:] = [pkg, *(entry for entry in sys.path if entry)]
    wrong = check(node, tuple(sys.version_info[:2]), importlib.import_module)
    if wrong:
        fail(int(fd), wrong)
    importlib.import_module("rlinf_actors.template.template").main(int(fd), node, config)
