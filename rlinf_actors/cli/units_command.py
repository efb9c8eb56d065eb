"""`rlinf-actors units`: the systemd units that come with this package."""

from __future__ import annotations

from pathlib import Path

import click

from rlinf_actors.cli.output import note
from rlinf_actors.systemd import unit_files as files

_NAMES = (*files.UNITS, *files.DROP_INS)


@click.group()
def units() -> None:
    """Show or install systemd units for the head and for agents."""


@units.command("print")
@click.argument("names", nargs=-1, type=click.Choice(_NAMES), metavar="[NAME]...")
def print_units(names: tuple[str, ...]) -> None:
    """Print units with the paths of this installation: rlinf-head.service, rlinf-agentd@.service and
    rlinf-workers@.service, and the drop-ins of the last two, rlinf-agentd@.service.d/hardened.conf and
    rlinf-workers@.service.d/hardened.conf. Default: all.
    """
    chosen = names or _NAMES
    for name in chosen:
        if len(chosen) > 1:
            click.echo(f"# --- {name}")
        click.echo(files.text(name), nl=False)


@units.command("install")
@click.option("--dir", "directory", default=files.DIRECTORY, show_default=True, help="Where the units are written.")
@click.option("--hardened", is_flag=True, help="The drop-ins for nodes too; they say what workers cannot do then.")
@click.option("--force", is_flag=True, help="Overwrite files that somebody has changed.")
def install(directory: str, hardened: bool, force: bool) -> None:
    """Write the units into a directory, and say how to enable them. A file that was changed is left as it is."""
    names = _NAMES if hardened else files.UNITS
    steps = files.plan(Path(directory), names, force)
    files.carry_out(steps)
    for step in steps:
        click.echo(f"{step.what}: {step.path}")
    note(
        "then, as root:\n"
        "  systemctl daemon-reload\n"
        "  systemctl enable --now rlinf-agentd@USER    # on each node; USER runs the workers\n"
        "  useradd --system --no-create-home --shell /usr/sbin/nologin rlinf-head    # on the head's node, once\n"
        "  systemctl enable --now rlinf-head           # where the head runs without an agent"
    )
