"""Loads Redis' client without OpenTelemetry's SDK, which it would load wherever that is installed.

For the edges of processes, which import it before all else of ours; it spares them some milliseconds and
megabytes for measurements that are not switched on. Defines nothing.
"""

import sys

_ABSENT = "opentelemetry"

if _ABSENT not in sys.modules:
    sys.modules[_ABSENT] = None  # type: ignore[assignment]  # to its importers it is not installed
    try:
        import redis.asyncio  # noqa: F401
    finally:
        del sys.modules[_ABSENT]
