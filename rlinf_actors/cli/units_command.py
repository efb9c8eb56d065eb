"""`rlinf-actors units`: print, install or remove the systemd units of this package, and print rules of a firewall."""

from __future__ import annotations

from pathlib import Path

import click

from rlinf_actors.cli import firewall
from rlinf_actors.cli.output import confirm, echo, note, yes_option
from rlinf_actors.cli.queries import head_option
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.progress import Facts, named, showing_blocked
from rlinf_actors.systemd import unit_files as files
from rlinf_actors.systemd import unit_removal

_NAMES = (*files.UNITS, *files.DROP_INS, files.TMPFILES)


@click.group()
def units() -> None:
    """Show, install or remove systemd units for the head and for agentd."""


@units.command("print")
@click.argument("names", nargs=-1, type=click.Choice(_NAMES), metavar="[NAME]...")
@click.option("--firewall", "as_rules", is_flag=True, help="Print rules for nftables instead; see below.")
@click.option("--job", "namespaces", multiple=True, metavar="NAME", help="With --firewall: peers of this job.")
@click.option("--peer", "peers", multiple=True, metavar="ADDRESS", help="With --firewall: one more machine or network.")
@click.option("--ports", metavar="FIRST-LAST", help="With --firewall: ports of workers. Default: the kernel's range.")
@head_option
def print_units(
    names: tuple[str, ...],
    as_rules: bool,
    namespaces: tuple[str, ...],
    peers: tuple[str, ...],
    ports: str | None,
    head: str | None,
) -> None:
    """Print units with the paths of this installation.

    Units: rlinf-head.service, rlinf-agentd@.service, rlinf-workers@.service, and the drop-ins of the last two,
    rlinf-agentd@.service.d/hardened.conf and rlinf-workers@.service.d/hardened.conf; and rlinf-actors.conf for
    systemd-tmpfiles. Default: all.

    With --firewall: a file for `nft -f`, to load on each node. Only the nodes of the running cluster may connect to the
    ports of the head, of workers and of torch (ip_local_port_range of this machine). Name drivers' machines, and nodes
    that are to join, by --peer. With --job, only the nodes where the job has workers, and --peer, reach workers.
    """
    if as_rules:
        if names:
            raise click.UsageError("--firewall prints no units: leave out NAME")
        echo(firewall.of_cluster(head, namespaces, peers, ports), nl=False)
        return
    if namespaces or peers or ports or head:
        raise click.UsageError("--job, --peer, --ports and --head are for --firewall")
    chosen = names or _NAMES
    for name in chosen:
        if len(chosen) > 1:
            echo(f"# --- {name}")
        echo(files.text(name), nl=False)


@units.command("install")
@click.option("--dir", "directory", default=files.DIRECTORY, show_default=True, help="Directory to write the units to.")
@click.option(
    "--hardened",
    is_flag=True,
    help="Also write the drop-ins that restrict nodes; each says what workers cannot do then.",
)
@click.option("--force", is_flag=True, help="Overwrite files that were changed by hand.")
def install(directory: str, hardened: bool, force: bool) -> None:
    """Write the units into a directory, and print the commands that enable the units. A file that was changed by hand
    is not overwritten without --force. tmpfiles.d gets a file for the directories of sockets and log files.
    """
    names = _NAMES if hardened else (*files.UNITS, files.TMPFILES)
    steps = files.plan(Path(directory), names, force)
    files.carry_out(steps)
    for step in steps:
        echo(f"{step.what}: {step.path}")
    note(
        "then, as root:\n"
        "  systemctl daemon-reload\n"
        "  systemctl enable --now rlinf-agentd@USER    # on each node; USER runs the workers\n"
        "  systemctl enable --now rlinf-agentd         # instead, if agentd.toml maps each driver to a user\n"
        "  useradd --system --no-create-home --shell /usr/sbin/nologin rlinf-head    # on the head's node, once\n"
        "  systemctl enable --now rlinf-head           # where the head runs without an agentd"
    )


@units.command("uninstall")
@click.option("--dir", "directory", default=files.DIRECTORY, show_default=True, help="Directory that has the units.")
@click.option("--force", is_flag=True, help="Also remove files that were changed by hand.")
@yes_option
def uninstall(directory: str, force: bool, yes: bool) -> None:
    """Stop and disable the units on this machine, and remove the files that `units install` has written.

    Workers of this machine end, as with `systemctl stop`. A stop of the head alone ends no jobs elsewhere. A file
    that was changed by hand is not removed without --force. Configuration, keys, logs and state stay.
    """
    folder = Path(directory)
    found = unit_removal.find(folder, force)
    if not found.files and not found.units:
        note(f"no unit of rlinf-actors is in {directory}")
        _tell_what_stays(found)
        return
    for unit in found.units:
        note(f"stop and disable: {unit}{' (running)' if unit in found.running else ''}")
    for path in found.files:
        note(f"remove: {path}")
    running, removed = counted(len(found.running), "running unit"), counted(len(found.files), "file")
    confirm(yes, f"stops {running} with all workers, and removes {removed}", "Do this?")
    with showing_blocked(lambda: Facts(named("waiting for systemd to stop ", found.running) or "waiting for systemd")):
        unit_removal.carry_out(found, folder)
    for path in found.files:
        echo(f"removed: {path}")
    _tell_what_stays(found)


def _tell_what_stays(found: unit_removal.Removal) -> None:
    for path in found.kept:
        note(f"kept, because it was made or changed by hand: {path}")
    if found.left:
        note(f"left, with configuration, keys, state and logs: {', '.join(found.left)}")
