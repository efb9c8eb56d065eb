"""agentd as a script, for tests/live/other_user.py: `agentd_script.py USER ARGUMENTS...`.

It says to the head that it runs as USER; "" for the truth.
"""

from __future__ import annotations

import sys

from agentd.command_line import main
from rlinf_actors.security import keyfile

if __name__ == "__main__":
    if sys.argv[1]:
        keyfile.user = lambda: sys.argv[1]  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
