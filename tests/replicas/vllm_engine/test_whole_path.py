"""An adapter from a client's request to vLLM and back: a real router, Redis and a replica process."""

from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

SYSTEM = "You are a patient assistant who explains how caches work. " * 12


@pytest.fixture(scope="module")
def stack(adapters: Mapping[str, str]) -> Iterator[LocalStack]:
    settings: dict[str, Any] = {
        "engine": "vllm",
        "model_name": "toy",
        "num_blocks": 64,
        "max_batched_tokens": 256,
        "max_running": 16,
        "adapters": ",".join(f"{name}={directory}" for name, directory in adapters.items()),
    }
    with local_stack(num_replicas=1, replica_settings=settings) as running:
        yield running


def test_adapters_answer_by_their_names_and_share_their_blocks_with_nobody_else(
    stack: LocalStack, adapters: Mapping[str, str]
) -> None:
    first, second = adapters
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:

        def ask(model: str, user: str) -> tuple[str, int, int]:
            completion = client.chat.completions.create(
                model=model,
                user=user,
                temperature=0,
                max_tokens=12,
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And?"}],
            )
            assert completion.model == model
            details: Any = completion.usage.prompt_tokens_details if completion.usage else None
            text = completion.choices[0].message.content or ""
            return text, details.cached_tokens, details.cross_user_cached_tokens

        assert {model.id for model in client.models.list()} == {"toy", first, second}
        cold = [ask(model, "ada") for model in ("toy", first, second)]
        assert len({text for text, _, _ in cold}) == 3
        assert [(cached, of_others) for _, cached, of_others in cold] == [(0, 0)] * 3
        warm = [ask(model, "bob") for model in ("toy", first, second)]
        assert [text for text, _, _ in warm] == [text for text, _, _ in cold]
        assert all(cached > 100 and of_others == cached for _, cached, of_others in warm)
