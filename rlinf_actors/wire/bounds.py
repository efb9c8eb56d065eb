"""Types of fields whose values go into timers, sums and system calls, which not every number fits.

msgspec refuses the others while it decodes; who writes a message must not make them.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

Number = Annotated[float, Meta(ge=-sys.float_info.max)]
"""Any number but NaN (and minus infinity), which no comparison holds for: a timer that is due then never is, or always."""
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""What pidfd_open takes; 0 for none."""
