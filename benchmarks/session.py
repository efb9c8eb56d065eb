"""Run one repetition of a case on a backend: ``python -m benchmarks.session BACKEND CASE RESULT``.

The runner is the parent and a subreaper. It ends the processes that this process leaves.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys

from benchmarks.backends import load_backend
from benchmarks.cases import CASES
from benchmarks.processes import die_with_parent
from benchmarks.timing import calibrate


def main() -> None:
    die_with_parent()
    backend_name, case_name, path, limit_s = sys.argv[1:]
    faulthandler.dump_traceback_later(float(limit_s), exit=True)  # into the log, which the runner shows
    before = calibrate()
    case, backend = CASES[case_name], load_backend(backend_name)
    if backend_name not in ("zmq", "prototype"):  # the raw limits time these imports
        for module in case.driver_imports:
            importlib.import_module(module)
    figures = backend.measure(case)
    unknown = set(figures) - {name for figure in case.figures for name in (figure.name, figure.limit_name)}
    if unknown:
        raise KeyError(f"case {case_name} gives figures that it does not declare: {sorted(unknown)}")
    with open(path, "w") as file:
        json.dump({"figures": figures, "calibration_s": [before, calibrate()]}, file)


if __name__ == "__main__":
    main()
