"""All environment variables that the project reads or sets: their names, and what docs/reference/settings.md says.

`python -m tests.reference_pages` writes that page. A docstring has the meaning, the default and who reads the variable;
a field of `Settings` or `CodeSettings` in braces stands for its default. Variables without a default are set by the
runtime, by systemd or by others.
"""

from __future__ import annotations

HEAD = "RLINF_HEAD"
"""Address of the head, `HOST:PORT` or a ZeroMQ endpoint. Without it, and without a client file, a driver starts a
private single-node cluster. `private`: the driver starts a private cluster even if a client file names a head.

Default: the client file's
Read by: driver, agentd, `rlinf-actors`
"""

CLIENT_CONFIG = "RLINF_ACTORS_CLIENT_CONFIG"
"""The client file, instead of the files below.

Default: the usual places
Read by: driver, `rlinf-actors`
"""

HEADS_DIR = "RLINF_ACTORS_HEADS"
"""Directory of the heads' records. Commands, also the emergency stop, find only heads with the same directory. For
tests and containers.

Default: /tmp, else /dev/shm; the unit's directory
Read by: agentd, head, `rlinf-actors`
"""

NODE_RANK = "RLINF_NODE_RANK"
"""This node's rank; set it on all nodes or on no node.

Default: chosen by the head
Read by: agentd
"""

NUM_NODES = "RLINF_ACTORS_NUM_NODES"
"""Number of nodes for which `Cluster()` waits at a head, if neither its argument nor the configuration says one;
`rlinf-actors run` sets it for its program.

Default: {num_nodes}
Read by: driver
"""

PATH_ENV_MERGE_MODE = "RLINF_PATH_ENV_MERGE_MODE"
"""PATH-like variables of workers. `append`: the configuration's value, then the node's. `override`: the configuration's
value only.

Default: {path_env_merge_mode}
Read by: driver
"""

EXT_MODULE = "RLINF_EXT_MODULE"
"""Module whose `register()` adds hardware types. It is imported in the hardware probe, in the node's check of
configured hardware, in the driver and in every worker; see [Add a vendor or a robot](../how-to/add-hardware.md).

Default: none
Read by: agentd, driver, worker
"""

COMM_NET_DEVICES = "RLINF_COMM_NET_DEVICES"
"""Network interfaces, comma-separated, for gloo, NCCL and the stores of lanes.

Default: the interface that has the node's address
Read by: driver, worker
"""

TIMEOUT_MINUTES = "RLINF_TIMEOUT"
"""Longest time of a transfer by a lane, in minutes.

Default: torch's
Read by: worker
"""

LOG_LEVEL = "RLINF_LOG_LEVEL"
"""Level of `self.log_info()` and its siblings: `DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`. Workers inherit the
driver's value unless `env_vars` set another. In a driver, the level of this library's messages, which go to the
program's log handlers, or to stderr if it has none. An unknown level raises ConfigError.

Default: `INFO` in workers, none in drivers
Read by: driver, worker
"""

CATCH_FAILURE = "RLINF_CATCH_FAILURE"
"""`1`: a worker that SIGQUIT, SIGUSR1 or SIGUSR2 ends prints the Python stacks of its threads first. Workers inherit
the driver's value; `launch(catch_system_failure=)` overrides it.

Default: `0`
Read by: worker
"""

PTRACE = "RLINF_ACTORS_PTRACE"
"""`1`: from its start a worker lets all processes of its template trace it, other workers too, so that `rlinf-actors
stack --py-spy` works where `kernel.yama.ptrace_scope` is 1 and the worker cannot answer. Workers inherit the driver's
value.

Default: `0`
Read by: worker
"""

SHARED_MEMORY = "RLINF_ACTORS_SHARED_MEMORY"
"""Bytes of shared memory that the process may lend to other processes of its machine; 0 for none.

Default: {shared_memory_bytes}, at most a quarter of the machine's memory
Read by: driver, worker
"""

LOCAL_LINK = "RLINF_ACTORS_LOCAL_LINK"
"""What carries calls, messages and channels between processes of one node: `unix` (a unix stream) or `zmq` (ZeroMQ).
Two processes use ZeroMQ unless both have `unix`.

Default: {local_link}
Read by: driver, worker
"""

RELAY_FROM = "RLINF_ACTORS_RELAY_FROM"
"""Ranks of a group on other nodes (with at least 8 each) from which it is called by node relays, so that a call costs
one message a node instead of one a rank; 0: never ([How it works
inside](../explanation/internals.md#a-large-group-on-other-nodes)).

Default: {relay_from}
Read by: the process that launches a group
"""

SEND_WINDOW = "RLINF_ACTORS_SEND_WINDOW"
"""Bytes that may be on their way to one other worker and not received; at least 1 MiB.

Default: {send_window_bytes}
Read by: worker
"""

CHANNEL_BYTES = "RLINF_ACTORS_CHANNEL_BYTES"
"""Bytes in a channel before puts wait; 0 for no limit.

Default: {channel_bytes}
Read by: the process that creates the channel
"""

PATHS = "RLINF_ACTORS_PATHS"
"""Paths for kinds of buffers that go before the usual ones, such as `cpu=lane,accelerator=staged`; `rlinf-actors paths`
shows the table.

Default: none
Read by: worker that sends
"""

RAW_OUTPUT = "RLINF_ACTORS_RAW_OUTPUT"
"""`1`: the driver prints its workers' output with all control characters. Otherwise tabs and colours pass, and the
others are shown as escapes ([Security](../explanation/security.md#terminals)).

Default: `0`
Read by: driver
"""

LOG_FORMAT = "RLINF_ACTORS_LOG_FORMAT"
"""`json`: `log_info` and its siblings write [a record](json.md#a-logged-record) as a line of JSON. Handlers that a
program has installed keep their format.

Default: `text`
Read by: driver, for its workers; node
"""

LOG_JOIN = "RLINF_ACTORS_LOG_JOIN"
"""`0`: the driver prints equal lines of several ranks each. Otherwise those that come within 0.3 s become one:
`[actor:0-7 x8] loading model`.

Default: `1`
Read by: driver
"""

LOG_RATE = "RLINF_ACTORS_LOG_RATE"
"""Lines a second of each worker, of stdout and of stderr, that the driver prints in the long run, and 5 times as many
of all workers; 0: all. A quiet worker may print 50 times as many at once, all workers together twice that. The others
are held back: a line says how many every 5 s, and the log files have them.

Default: {log_rate}
Read by: driver
"""

PROGRESS = "RLINF_ACTORS_PROGRESS"
"""`0`: no lines on stderr about waits: for nodes, workers, code on its way, answers of a head or node, and ends.
Otherwise a terminal or notebook shows a wait after 2 s on its last line; elsewhere a line is printed after 30 s, and
then after twice as long each time. From 30 s on, a line says what is missing.

Default: `1`
Read by: driver, command line
"""

NO_COLOR = "NO_COLOR"
"""With any value, no colours, bold headings or other escape sequences go to a terminal, and `top` draws its screen
without colours.

Default: none
Read by: command line; driver, for lines about waits
"""

TERM = "TERM"
"""`dumb`: no colours, bold headings or other escape sequences go to a terminal.

Default: the terminal's
Read by: command line; driver, for lines about waits
"""

WAIT_LINES = "RLINF_ACTORS_WAIT_LINES"
"""Seconds without progress after which a wait logs a line that says what the workers do; then after twice as long each
time. 0: no lines, and errors of time limits name only ranks that are called.

Default: {wait_lines_s}
Read by: driver
"""

LOST_ERRORS = "RLINF_ACTORS_LOST_ERRORS"
"""What an error does that no code awaits, beside being logged ([Reliability](../explanation/reliability.md)).
`exit-code`: the driver goes on, and its exit code is 1 instead of 0. `end`: the driver ends within a second. `log`:
nothing more.

Default: `exit-code`; `end` with `RLINF_ACTORS_DROPIN=1`
Read by: driver
"""

ROBOT_OWNER_MUST_ANSWER = "RLINF_ACTORS_ROBOT_OWNER_MUST_ANSWER"
"""`1`: a driver that does not answer for a robot lease loses its robots. `0`: the driver's process only has to exist.
`launch(robot_owner_must_answer=)` overrides it ([Robot safety](../explanation/robot-safety.md)).

Default: `1` if a robot is on another host, else `0`
Read by: driver
"""

KEPT_LOGS = "RLINF_ACTORS_KEPT_LOGS"
"""Directory for the logs of private clusters in which something failed; `none`: the logs are removed with the cluster
([Reliability](../explanation/reliability.md)).

Default: `~/.local/state/rlinf-actors/kept-logs`
Read by: driver, its agentd
"""

RUN_DIR = "RLINF_ACTORS_RUN_DIR"
"""Parent directory of sockets.

Default: per user
Read by: driver, agentd
"""

LOG_DIR = "RLINF_ACTORS_LOG_DIR"
"""Directory of workers' logs.

Default: in the run directory
Read by: driver, agentd
"""

LISTEN = "RLINF_ACTORS_LISTEN"
"""Address on which the head listens, `HOST:PORT`; `--listen` overrides it.

Default: `127.0.0.1:6380`
Read by: `rlinf-actors head`
"""

KEY_DIR = "RLINF_ACTORS_KEYS"
"""Directory of key files (mode 0700). If you set it, its keys are used for every address. Keys of the default directory
are used on loopback only if it has head.key; see [Security](../explanation/security.md).

Default: `~/.config/rlinf-actors/keys`
Read by: driver, agentd, head, `rlinf-actors`
"""

KEY_FILE = "RLINF_ACTORS_KEY_FILE"
"""This process's key file; `[security] key_file` in agentd.toml.

Default: in that directory
Read by: driver, agentd, head, `rlinf-actors`
"""

HEAD_KEY = "RLINF_ACTORS_HEAD_KEY"
"""Public key of the head, if it differs from that in the key file; `[security] head_key` in agentd.toml.

Default: in the key file
Read by: driver, agentd, `rlinf-actors`
"""

CONFIG_FILE = "RLINF_ACTORS_CONFIG"
"""Its configuration file.

Default: the usual places
Read by: agentd
"""

INSECURE_TEST_NETWORK = "RLINF_ACTORS_INSECURE_TEST_NETWORK"
"""`1`: no keys are needed on TCP, nor this user's own key on loopback. Only for closed test networks.

Default: none
Read by: driver
"""

FAULTS = "RLINF_ACTORS_FAULTS"
"""Faults to inject, a JSON list; see [Reliability](../explanation/reliability.md). For tests.

Default: none
Read by: agentd, head, driver, template, worker
"""

CODE_WORKING_DIR = "RLINF_CODE_WORKING_DIR"
"""The code that workers run: an absolute path, `auto` (the checkout of RLinf, else the project around the working
directory), or `0` (each node's own). It overrides the configuration ([Send code to nodes](../how-to/send-code.md)).

Default: `runtime: working_dir` in the configuration
Read by: driver
"""

CACHE_DIR = "RLINF_ACTORS_CACHE_DIR"
"""Directory on the node for code that drivers send and for environments.

Default: `$XDG_CACHE_HOME/rlinf-actors`, else ~/.cache/rlinf-actors
Read by: agentd, worker
"""

CODE_BYTES = "RLINF_ACTORS_CODE_BYTES"
"""Size of the largest directory of code that the node accepts.

Default: {max_bytes}
Read by: worker on the node
"""

CODE_FILES = "RLINF_ACTORS_CODE_FILES"
"""Most files and directories of such code.

Default: {max_files}
Read by: worker on the node
"""

CODE_CACHE_BYTES = "RLINF_ACTORS_CODE_CACHE_BYTES"
"""Bytes of code that the node keeps; beyond it, code that no process uses is removed, the longest unused first.

Default: {cache_bytes}
Read by: worker on the node
"""

ENVIRONMENTS_KEPT = "RLINF_ACTORS_ENVIRONMENTS_KEPT"
"""Number of environments that the node keeps; beyond it, those that no process uses are removed.

Default: {environments_kept}
Read by: worker on the node
"""

DROPIN = "RLINF_ACTORS_DROPIN"
"""`1`: `rlinf.scheduler` is served by rlinf_actors, in this process, its children and its workers. Set by `python -m
rlinf_actors.dropin`; read at the start of Python after `rlinf-actors dropin --install`.

Default: none
Read by: driver, worker
"""

PROBE_ROOT = "RLINF_ACTORS_PROBE_ROOT"
"""Directory whose `dev`, `sys` and tool directories are used instead of the machine's, such as a host's directory that
is mounted in a container.

Default: `/`
Read by: agentd's hardware probe; workers with `numa_bind`
"""

# --- set by the runtime, by systemd, by Slurm and by Python ---

PYTHONBREAKPOINT = "PYTHONBREAKPOINT"
"""Python's own: the function that `breakpoint()` calls, 0 for none."""
NET_EMULATION = "RLINF_ACTORS_NET_EMULATION"
"""Set in every worker of a job whose configuration has ``net_emulation``: that section, in JSON."""
KEEPER = "RLINF_ACTORS_KEEPER"
CODE_HASH = "RLINF_ACTORS_CODE_HASH"
CODE_DIR = "RLINF_ACTORS_CODE_DIR"
"""Set in the workers that run code which their driver sent: its hash, and the directory of their copy."""
SLURM_NODE = "SLURMD_NODENAME"
"""Set by Slurm in each task: the name of its node."""
STATE_DIR = "STATE_DIRECTORY"
"""Set by systemd for a unit with StateDirectory=."""
FOR_THE_UNIT_ALONE = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
     "JOURNAL_STREAM", "MAINPID", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "FDSTORE",
     "CREDENTIALS_DIRECTORY", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY", "CACHE_DIRECTORY", "CONFIGURATION_DIRECTORY",
     STATE_DIR, LISTEN, KEEPER, KEY_FILE}
)  # fmt: skip
"""Variables of systemd and agentd for one process of a unit. Its children do not inherit them."""
NAMESPACE = "CLUSTER_NAMESPACE"
CHILDREN = "RLINF_ACTORS_CHILDREN"
"""Set in every worker to the socket where its child processes become members. Not a secret."""
CLUSTER_MARK = "RLINF_ACTORS_CLUSTER"
"""Set in the agentd of a private cluster, and inherited by its processes: the run directory."""
PROBE_LIMIT = "RLINF_ACTORS_PROBE_LIMIT"
"""Set by the hardware probe in its child processes: seconds until the probe kills the child."""
TEST_MARK = "RLINF_ACTORS_TEST"
"""Set by the pytest plugin during a test, so that processes left by the test can be found."""
