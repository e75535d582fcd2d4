"""Loads Redis' client without OpenTelemetry's SDK, which it would load wherever that is installed.

Process entry points import it first; it saves milliseconds and megabytes for metrics that are off. Defines
nothing.
"""

import sys

_ABSENT = "opentelemetry"

if _ABSENT not in sys.modules:
    sys.modules[_ABSENT] = None  # type: ignore[assignment]  # to its importers it is not installed
    try:
        import redis.asyncio  # noqa: F401
    finally:
        del sys.modules[_ABSENT]
