"""Types of fields whose values go into timers, sums and system calls, which not every number fits.

msgspec refuses the others while it decodes; who writes a message must not make them.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

MAX_SIZE = 100_000
"""Ranks of a group: a head that is told of more would count them one by one."""

Number = Annotated[float, Meta(ge=-sys.float_info.max)]
"""Any number but NaN and minus infinity. No comparison holds for NaN: a timer that is due then never is, or always."""
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""What pidfd_open takes; 0 for none."""
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
"""How many there are of something that is counted through."""
