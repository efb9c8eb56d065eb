"""The exit codes of agentd, the head, workers, drivers and commands. docs/reference/errors.md is made from this file.

The numbers from 64 are those of sysexits.h. Imports nothing: every program imports this module, some before all others.
"""

SUCCESS = 0
"""The program did what it was asked to do; agentd and the head: ended on request, or handed over.

Unit: is restarted, unless stopped by ``systemctl stop``.
"""
FAILURE = 1
"""A command failed, a check of ``doctor`` failed, or a worker or driver ended by an error.

Cause: of a command, the line on stderr says what. A driver ends with 1 instead of 0 if an error of a call was never
awaited. A worker ends with 1 if the head has declared it dead, or if a child that it forked returned from a method.

Fix: read stderr; of a worker, ``rlinf-actors logs GROUP``.

Unit: is restarted.
"""
STOPPED = 3
"""``rlinf-actors head stop`` ended the cluster (head and ``agentd --head``).

Cause: an operator, whom ``rlinf-actors events`` names.

Fix: to run the cluster again, start the head.

Unit: stays down, not in the state failed.
"""
USAGE = 64
"""The command line is wrong, or the request is impossible as it was made.

Cause: an unknown option or argument, or a missing one.

Fix: read the line on stderr, and ``--help``.

Unit: stays down.
"""
UNAVAILABLE = 69
"""Something that the program needs is unavailable.

Cause: of a command, no head answers; of ``estop``, a head did not acknowledge, or the end of a robot worker is not
confirmed. Of agentd: there is no route to the head's machine, or its name is not found. Of agentd and the head: the
owner has ended, a directory cannot be made, the file system of the head's state is full, or workers of another protocol
run in agentd's run directory. Of all: this operating system is not Linux.

Fix: mend what the line on stderr names. ``rlinf-actors doctor`` checks the route to the head.

Unit: is restarted after 1 s.
"""
INTERNAL_ERROR = 70
"""A bug: an internal error of agentd, the head or a template.

Cause: an exception, whose traceback is in the log.

Fix: report it with the traceback. Workers go on, and the next agentd or head takes them over.

Unit: is restarted.
"""
LEASE_LOST = 76
"""A worker with robots ended because its lease was over, after ``on_lease_lost`` had stopped the robots.

Cause: its driver, agentd or node was lost, or an emergency stop was pressed. The last line of its stderr says which.

Fix: make the cell safe, and launch again.
"""
NO_PERMISSION = 77
"""The program may not do that.

Cause: this key or user lacks the right, or a file is not readable or writable.

Fix: use a key with that right (``rlinf-actors keys list``), or correct the permissions of the file that is named.

Unit: is restarted.
"""
CONFIGURATION = 78
"""A configuration, a placement or a key is wrong, or the head refuses this node.

Cause: a file, a variable or a key file with a fault, which is named; an address in use; or a rank or name that another
node has. (An agentd with a key tries again instead, since the fault may be the other node's.)

Fix: correct what is named. ``agentd --check-config`` reads the files and starts nothing.

Unit: stays down, since a restart would fail again.
"""
NOT_EXECUTABLE = 126
"""The program of ``rlinf-actors run`` cannot be executed.

Fix: make it executable, or name its interpreter: ``rlinf-actors run -- python train.py``.
"""
NOT_FOUND = 127
"""The program of ``rlinf-actors run`` does not exist, or is in no directory of PATH.

Fix: correct its name.
"""
INTERRUPTED = 130
"""Ctrl-C or Ctrl-D ended a command: nothing was changed that the command had not reported."""
