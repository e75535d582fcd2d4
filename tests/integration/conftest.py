"""A whole request path of real processes: Redis, replicas and a router, without Ray."""

from collections.abc import Iterator

import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack

PATIENT = {"history_wait_seconds": 10}
"""A busy machine is no slow Redis."""


@pytest.fixture(scope="module")
def simulated_stack() -> Iterator[LocalStack]:
    """Two simulated replicas that answer at the pace of a GPU: 8 ms a token."""
    settings = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}
    with local_stack(num_replicas=2, replica_settings=settings, router_settings=PATIENT) as stack:
        yield stack


@pytest.fixture(scope="module")
def toy_stack() -> Iterator[LocalStack]:
    """Two replicas of our own engine with the model that ships."""
    settings = {"engine": "torch", "model_name": "toy", "num_threads": 1}
    with local_stack(num_replicas=2, replica_settings=settings, router_settings=PATIENT) as stack:
        yield stack
