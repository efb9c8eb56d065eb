"""Buffer: what travels without being looked into."""

from __future__ import annotations

from typing import Union

Buffer = Union[bytes, bytearray, memoryview]
