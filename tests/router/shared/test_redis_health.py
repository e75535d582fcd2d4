"""An outage of Redis is logged once, and once when every operation works again."""

import asyncio
import logging

import pytest
from redis.exceptions import RedisError

from router.shared.redis_health import RedisHealth

LOGGER = logging.getLogger("tests.redis_health")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" error=")[0] for record in caplog.records]


def test_an_outage_is_logged_once_and_ends_when_no_operation_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    health = RedisHealth(LOGGER, "away", "back")
    for operation in ("reading", "writing", "reading"):
        health.failed(RedisError("no"), operation)
    health.answered("reading")
    assert logged(caplog) == ["away"]
    health.answered("writing")
    health.answered("writing")
    assert logged(caplog) == ["away", "back"]


async def test_a_late_answer_is_a_failure_after_which_redis_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    health = RedisHealth(LOGGER, "away", rest_seconds=2.0, clock=lambda: now)
    with pytest.raises(TimeoutError):
        async with health.deadline(0.0):
            await asyncio.sleep(1)
    assert health.is_resting and logged(caplog) == ["away"]
    now += 2
    assert not health.is_resting


async def test_an_error_of_ones_own_says_nothing_of_redis(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    health = RedisHealth(LOGGER, "away", "back")
    health.failed(RedisError("no"))
    with pytest.raises(KeyError):
        async with health.deadline(1.0):
            raise KeyError
    assert logged(caplog) == ["away"] and not health.is_resting
