"""Profiler: the program under which a worker is started, such as nsys, and where its files go. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

OUTPUT, OUTPUT_DIR, OUTPUT_NAME = "{output}", "{output_dir}", "{output_name}"
"""Stand in a command or variable for the path of a worker's profile without suffix, its directory and its last part."""

_WHY = "A command line of nsys has a dozen words."
Word = Annotated[str, Meta(max_length=4096, title="path", description="PATH_MAX of Linux.")]


class Profiler(msgspec.Struct, frozen=True):
    """The program under which a worker is started.

    Attributes:
        command: the program's name and arguments, up to the interpreter; may contain OUTPUT and the like.
        env: variables of the worker that the program reads; may contain them too.
        directory: directory of the profile on the node; "" for the directory of the worker's log files.
    """

    command: Annotated[list[Word], Meta(max_length=1024, title="command line", description=_WHY)]
    env: Annotated[dict[Word, Word], Meta(max_length=1024, title="command line", description=_WHY)] = msgspec.field(
        default_factory=dict
    )
    directory: Word = ""

    def program(self) -> str:
        """Return the name or path of the program."""
        return self.command[0]

    def command_for(self, program: str, output: str) -> list[str]:
        """Return the command with the path *program*, for a worker whose profile has the path *output*."""
        return [program, *(_filled(word, output) for word in self.command[1:])]

    def env_for(self, output: str) -> Mapping[str, str]:
        """Return the variables for a worker whose profile has the path *output*."""
        return {name: _filled(value, output) for name, value in self.env.items()}


def _filled(text: str, output: str) -> str:
    directory, name = os.path.split(output)
    return text.replace(OUTPUT, output).replace(OUTPUT_DIR, directory).replace(OUTPUT_NAME, name)
