from __future__ import annotations

import importlib.util

if any(importlib.util.find_spec(name) is None for name in ("aiohttp", "jinja2", "prometheus_client")):
    collect_ignore_glob = ["test_*.py"]  # without the extra `web`
