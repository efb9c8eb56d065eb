"""What a program reports: the digits of its run, and how long each part took.

The last line that it prints is one JSON object: `digits` is the same on every runtime and machine, `seconds` is not.
"""

import json
import time
from typing import Any

DIGITS = 8  # significant: sums of many processes may come in another order


def rounded(value: Any) -> Any:
    """Return `value` as JSON has it, with all numbers rounded."""
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if hasattr(value, "tolist"):
        return rounded(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


class Report:
    """Times the parts of a program, and collects what its runner logs."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.steps: list[dict[str, Any]] = []
        self.step_seconds: list[float] = []

    def part(self, name: str) -> None:
        """End a part, which began when the part before it ended."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now

    def watch(self, runner: Any, without: tuple[str, ...] = ()) -> None:
        """Collect the metrics that `runner` logs, except times and keys that begin with one of `without`."""
        logged = runner.metric_logger.log

        def log(data: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
            if data and "time/step" in data:
                self.step_seconds.append(round(float(data["time/step"]), 5))
            kept = {key: each for key, each in (data or {}).items() if not key.startswith(("time/", *without))}
            if kept and not kwargs.get("worker_group_name"):
                self.steps.append({"step": step, **kept})
            logged(data, step, *args, **kwargs)

        runner.metric_logger.log = log

    def write(self, **digits: Any) -> None:
        """Print the report."""
        seconds = {**self.seconds, "steps": self.step_seconds}
        print(json.dumps({"digits": rounded({"steps": self.steps, **digits}), "seconds": seconds}), flush=True)
