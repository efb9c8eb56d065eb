"""docs/reference/settings.md, from the docstrings of environment variables and of configuration fields."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from agentd import config_fields
from rlinf_actors import procfs, variables
from rlinf_actors.net import discovery
from rlinf_actors.settings import CodeSettings, Settings

INTRODUCTION = """\
Each process reads these variables from its own environment. A worker's environment comes from its node and from `env_vars`
in the configuration. An invalid value raises a ConfigError that names the variable.
"""
SYSTEMD = """\
agentd and `rlinf-actors head` read these variables if they are the main process of a unit
([Install and operate a cluster](../how-to/operate.md)). The processes that they start do not inherit the variables. A driver's
private agentd does not read them.

| variable | set by | meaning |
|---|---|---|
| `RUNTIME_DIRECTORY`, `LOGS_DIRECTORY`, `STATE_DIRECTORY` | `RuntimeDirectory=`, … | run directory, directory of workers' logs, directory of the head's state; the command line, a variable above and agentd.toml override them |
| `CREDENTIALS_DIRECTORY` | `LoadCredential=` | directory of key files, unless `RLINF_ACTORS_KEYS` is set; an empty key file counts as absent |
| `NOTIFY_SOCKET`, `WATCHDOG_USEC`, `WATCHDOG_PID` | `Type=notify`, `WatchdogSec=` | socket for the service's status and watchdog messages, and the watchdog's interval |
| `RLINF_ACTORS_KEEPER` | `Environment=` in rlinf-agentd@.service | socket of the keeper in rlinf-workers@.service, which starts templates there; without it agentd starts its own keeper |
| `JOURNAL_STREAM` | a unit whose stderr is the journal | if stderr is that stream, log lines have priorities (`<3>` error, `<4>` warning, `<6>` info, `<7>` debug) |
| `SERVICE_RESULT` | `ExecStopPost=` | result of the service, for `agentd --reap` |
"""
CLIENT = """\
/etc/rlinf-actors/client.toml applies to all users of the machine. ~/.config/rlinf-actors/client.toml overrides it, and the
environment overrides both. Only the file's owner and root may have write permission. An unknown key is an error.
"""
AGENTD = """\
`node.name` below is the key `name` in the table `[node]`. The files, their order and how to check them:
[Install and operate a cluster](../how-to/operate.md). A key with the note "re-read on SIGHUP" changes without a restart.
"""


def documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names that an assignment makes, each with the docstring below it, "" without one."""
    for one, following in pairwise([*body, ast.Pass()]):
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            yield one.targets[0].id, text
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, text


def fields_of(kind: type) -> dict[str, str]:
    [body] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    return dict(documented(body.body))


def cell(text: str) -> str:
    """A sentence or more in a cell of a table, without the last full stop."""
    return " ".join(text.split()).removesuffix(".")


def lines_of(docstring: str) -> tuple[str, dict[str, str]]:
    """The meaning, and the lines below it, such as "Default: none"."""
    meaning, _, more = docstring.partition("\n\n")
    found = re.findall(r"^(Default|Read by): ((?:.|\n(?!Read by))*)", more, re.MULTILINE)
    return cell(meaning), {name: cell(text) for name, text in found}


def size(value: int) -> str:
    return f"{value >> 30} GiB" if value % (1 << 30) == 0 else f"{value >> 20} MiB"


def default_of_variable(text: str) -> str:
    """Replace a field of Settings or CodeSettings in braces by its default."""

    def shown(field: re.Match[str]) -> str:
        [value] = [getattr(kind, field[1]) for kind in (Settings(), CodeSettings()) if hasattr(kind, field[1])]
        if isinstance(value, str):
            return f"`{value}`"
        return size(value) if field[1].endswith("bytes") else f"{value:,g}"

    return re.sub(r"\{(\w+)\}", shown, text)


def default_in_toml(field: str, value: Any) -> str:
    """The default of a field of Config, as agentd.toml would have it."""
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if field == "umask":
        return f"0o{value:03o}"
    if isinstance(value, (int, float)):
        return f"{value:g}"
    if isinstance(value, str):
        return f'`"{value}"`'
    return ", ".join(f"`{one}`" for one in value) or ("[]" if isinstance(value, tuple) else "{}")


def page() -> str:
    """The page below its title."""
    names = {**vars(variables), **vars(procfs)}
    entries = dict(documented(ast.parse(inspect.getsource(variables)).body))
    rows, others = [], []
    for constant, docstring in entries.items():
        meaning, more = lines_of(docstring)
        if more:
            default = default_of_variable(more["Default"])
            rows.append(f"| `{names[constant]}` | {default} | {more['Read by']} | {meaning} |")
        elif re.match("RLINF_|CLUSTER_", str(names[constant])) and names[constant] not in SYSTEMD:
            others.append(f"`{names[constant]}`")
    others.append(f"`{procfs.WORKER_MARK}`")
    of_agentd = []
    config, texts = config_fields.Config(), fields_of(config_fields.Config)
    for table, keys in config_fields.KEYS.items():
        for key in keys:
            field = config_fields.field_of(table, key)
            meaning, more = lines_of(texts[field])
            default = more.get("Default") or default_in_toml(field, getattr(config, field))
            note = "; re-read on SIGHUP" if field in config_fields.RELOADABLE else ""
            of_agentd.append(f"| `{table}.{key}` | {default} | {meaning}{note} |")
    of_clients = [f"| `{key}` | {cell(text)} |" for key, text in fields_of(discovery.ClientFile).items()]
    return "\n".join([
        INTRODUCTION,
        "| variable | default | read by | meaning |", "|---|---|---|---|", *rows, "",
        f"The runtime sets {', '.join(sorted(others)[:-1])} and {sorted(others)[-1]}.", "",
        "## From systemd", "", SYSTEMD,
        "## client.toml", "", CLIENT,
        "| key | meaning |", "|---|---|", *of_clients, "",
        "## agentd.toml", "", AGENTD,
        "| key | default | meaning |", "|---|---|---|", *of_agentd, "",
    ])  # fmt: skip
