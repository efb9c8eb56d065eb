"""Feed bytes to a decoder: ``python -m tests.fuzz NAME [--seconds 60] [libFuzzer's options]``.

With atheris (``pip install atheris``), code coverage guides the bytes. Without it, or with ``--plain``, seeds are
changed at random. An unexpected exception ends the run and shows the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["rlinf_actors"]) if atheris else contextlib.nullcontext():
    from decoders import DECODERS, Decoder, mutated


def plain(decoder: Decoder, seconds: float, seed: int) -> int:
    """Check random inputs; return their number."""
    choose, end, count = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = mutated(decoder, choose)
        count += 1
        try:
            decoder.check(data)
        except BaseException:
            print(f"input {count} of seed {seed}: {data!r}")
            raise
    return count


def guided(name: str, seconds: float, options: list[str]) -> None:
    """Run libFuzzer, which ends the process."""
    decoder = DECODERS[name]

    def check(data: bytes) -> None:
        decoder.check(bytes(data))

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        """Change the input; every other time, start from one of our seeds instead."""
        if seed % 2:
            return mutated(decoder, random.Random(seed))[:max_size]
        return bytes(atheris.Mutate(data, max_size))

    atheris.Setup([name, f"-max_total_time={int(seconds)}", *options], check, custom_mutator=change)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("name", choices=[*DECODERS, "all"])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each decoder")
    parser.add_argument("--seed", type=int, default=1, help="of the random changes")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    chosen, options = parser.parse_known_args()
    if atheris and not chosen.plain and chosen.name != "all":
        guided(chosen.name, chosen.seconds, options)
    for name in DECODERS if chosen.name == "all" else [chosen.name]:
        print(f"{name}: {plain(DECODERS[name], chosen.seconds, chosen.seed)} inputs, all taken or refused")


if __name__ == "__main__":
    main()
