"""Without a collector to send to, no process loads OpenTelemetry's SDK."""

import subprocess
import sys

import pytest

from tests.redis_server import RedisServer

ROUTER = """
import random
import router.__main__
from router.assembly import Router
from router.config import RouterConfig
Router(RouterConfig(redis_url=URL), rng=random.Random(0))
"""

REPLICA = """
import asyncio
import replicas.__main__
from replicas.config import ReplicaConfig
from replicas.host import ReplicaHost

async def live():
    host = ReplicaHost(ReplicaConfig(redis_url=URL, engine="simulated", num_blocks=64))
    await host.start()
    await host.stop()

asyncio.run(live())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", [ROUTER, REPLICA], ids=["router", "replica"])
def test_nobody_who_sends_no_traces_loads_what_would_send_them(program: str, own_redis: RedisServer) -> None:
    text = program.replace("URL", repr(own_redis.url))
    text += "\nimport sys\nprint(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
