"""The name under which programs import the lease page; `worker.lease_guard` has the code."""

from rlinf_actors.worker.lease_guard import INCLUDE_DIR as INCLUDE_DIR
from rlinf_actors.worker.lease_guard import LeasePage as LeasePage
