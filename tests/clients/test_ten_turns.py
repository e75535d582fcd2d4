"""Ten turns with reasoning and tool calls: each finds in the cache what the one before it generated."""

import itertools

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "ten_turns.py", talking_cluster)


@pytest.mark.parametrize("api", ["chat", "responses_echoed", "responses_stored", "messages", "gemini"])
def test_each_turn_is_cached_to_within_a_block_of_the_end_of_the_one_before(seen: Seen, api: str) -> None:
    """The token that ended it has no KV: nothing came after it."""
    usages = seen[api]
    assert len(usages) == 20, usages
    for (num_prompt, num_output, _), (_, _, num_cached) in itertools.pairwise(usages):
        assert num_cached > num_prompt + num_output - 1 - BLOCK_SIZE, usages
