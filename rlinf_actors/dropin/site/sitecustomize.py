"""Installs the import finder of rlinf_actors.dropin at the start of Python, if RLINF_ACTORS_DROPIN is 1.

PYTHONPATH has the directory of this file in the children of a program that runs on rlinf_actors.dropin. Python imports
one sitecustomize, so this one then runs the next one on sys.path.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # PYTHONPATH keeps it, for children

if os.environ.get("RLINF_ACTORS_DROPIN") == "1":
    from rlinf_actors.dropin import install

    install()

_spec = PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = _next = module_from_spec(_spec)
    _spec.loader.exec_module(_next)
