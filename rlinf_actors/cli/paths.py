"""`rlinf-actors paths`: how buffers travel between workers."""

from __future__ import annotations

import click

from rlinf_actors.cli.output import json_option, show_json, show_table
from rlinf_actors.settings import Settings
from rlinf_actors.tensors.paths import COLUMNS, lines


@click.command()
@json_option
def paths(as_json: bool) -> None:
    """Show which way a buffer takes from one worker to another; the first row that fits decides.

    RLINF_ACTORS_PATHS, such as "cpu=lane,accelerator=staged", puts another path first.
    """
    names = ("kind", *COLUMNS, "path", "meaning")
    rows = lines(Settings.load().paths)
    if as_json:
        show_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    show_table([name.replace("_", " ").upper() for name in names], rows, "")
