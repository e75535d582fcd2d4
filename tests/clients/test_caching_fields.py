"""What clients can say of caching: accepted together, echoed, and prompts are computed ahead."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "caching_fields.py", talking_cluster)


def test_chats_take_all_fields_at_once_and_a_salt_keeps_them_apart(seen: Seen) -> None:
    first, *later = seen["chat"]["same"]
    assert first[1] == 0
    for num_prompt_tokens, num_cached_tokens in later:
        assert num_cached_tokens >= num_prompt_tokens - BLOCK_SIZE
    one, other, again = (cached for _, cached in seen["chat"]["salted"])
    assert one == other == 0 and again >= first[0] - BLOCK_SIZE


def test_responses_are_computed_ahead_and_echo_what_was_said_of_caching(seen: Seen) -> None:
    responses = seen["responses"]
    assert responses["ahead"] == [[], 0] and responses["text"] == HELLO
    num_prompt_tokens, num_cached_tokens = responses["usage"]
    assert num_cached_tokens >= num_prompt_tokens - BLOCK_SIZE
    key, options = responses["echoed"]
    assert key == "key" and options.items() >= {"mode": "explicit", "ttl": "30m"}.items()


def test_messages_are_computed_ahead(seen: Seen) -> None:
    content, reason, ahead = seen["messages"]["ahead"]
    assert (content, reason, ahead["output_tokens"]) == ([], "max_tokens", 0)
    usage = seen["messages"]["usage"]
    assert seen["messages"]["text"] == HELLO
    num_prompt_tokens = ahead["input_tokens"] + ahead["cache_creation_input_tokens"]
    assert usage["cache_read_input_tokens"] >= num_prompt_tokens - BLOCK_SIZE
