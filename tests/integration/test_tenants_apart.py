"""Two tenants with equal prompts on a whole path of real processes: nothing of one is the other's."""

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import pytest

from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, local_stack
from router.caller import Tenant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WORDS = ("river", "stone", "lamp", "seven", "garden", "quiet", "engine", "paper")
TENANTS = (
    Tenant(name="acme"),
    Tenant(name="beta"),
    Tenant(name="left", groups=("both",)),
    Tenant(name="right", groups=("both",)),
)
"""Left and right have agreed to share."""

TEXT = "Of what only one of them has asked, and nobody else may learn. " * 25
HOST_TOKENS, DISK_TOKENS = "host_cached_tokens", "disk_cached_tokens"


class Tenanted(NamedTuple):
    """`keys` are texts by the tenant's name."""

    stack: LocalStack
    keys: Mapping[str, str]

    def post(self, tenant: str, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.post(self.stack.url + path, json=body, headers=headers, timeout=60)

    def get(self, tenant: str, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.get(self.stack.url + path, headers=headers, timeout=60)

    def details(self, tenant: str, text: str = TEXT, **fields: Any) -> dict[str, Any]:
        """What its answer says of the prompt's tokens."""
        messages = [{"role": "user", "content": text}]
        answer = self.post(
            tenant, "/v1/chat/completions", model="toy", messages=messages, max_tokens=2, **fields
        )
        assert answer.status_code == 200, answer.text
        details: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
        return details

    def pass_through(self, tenant: str, num_prompts: int) -> None:
        rng = random.Random(num_prompts)
        for _ in range(num_prompts):
            self.details(tenant, " ".join(rng.choices(WORDS, k=400)))


@pytest.fixture(scope="module")
def tenanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenanted]:
    """One replica of our own engine: little device memory, a little more below it, and a disk."""
    folder = tmp_path_factory.mktemp("tenants")
    keys_file = folder / "keys.json"
    keys = write_key_file(keys_file, TENANTS)
    with local_stack(
        num_replicas=1,
        replica_settings={
            "engine": "torch",
            "model_name": "toy",
            "num_threads": 1,
            "num_blocks": 160,
            "host_kv_bytes": 8 * 2**20,
            "disk_kv_bytes": 64 * 2**20,
            "kv_folder": str(folder / "kv"),
        },
        router_settings={"keys_file": keys_file},
    ) as stack:
        yield Tenanted(stack, keys)


def test_equal_prompts_of_two_tenants_share_nothing_on_any_tier(tenanted: Tenanted) -> None:
    assert tenanted.details("acme")["cached_tokens"] == 0
    assert tenanted.details("beta")["cached_tokens"] == 0
    on_device = tenanted.details("acme")
    assert on_device["device_cached_tokens"] == on_device["cached_tokens"] > 256
    assert on_device["cross_user_cached_tokens"] == 0

    other = TEXT.replace("one", "none")
    assert tenanted.details("acme", other, prompt_cache_retention="24h")["cached_tokens"] == 0
    tenanted.pass_through("acme", 8)
    assert tenanted.details("beta", other)["cached_tokens"] == 0
    below = tenanted.details("acme", other)
    assert below[HOST_TOKENS] + below[DISK_TOKENS] > 256

    tenanted.stack.terminate("replica-0")  # which writes what it holds
    tenanted.stack.start("replica-0")
    tenanted.stack.wait_ready(1)
    third = tenanted.details("left", other)
    assert third["cached_tokens"] == third[HOST_TOKENS] == third[DISK_TOKENS] == 0
    assert tenanted.details("acme", other)[DISK_TOKENS] > 256


def test_a_group_that_agrees_shares_and_a_request_may_leave_it(tenanted: Tenanted) -> None:
    text = TEXT.replace("one", "two")
    assert tenanted.details("left", text, user="ada")["cached_tokens"] == 0
    shared = tenanted.details("right", text, user="ada")
    assert shared["cached_tokens"] == shared["cross_user_cached_tokens"] > 256
    assert tenanted.details("acme", text)["cached_tokens"] == 0
    alone = {"authorization": f"Bearer {tenanted.keys['right']}", "x-kvasir-cache-group": "none"}
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = httpx.post(tenanted.stack.url + "/v1/chat/completions", json=body, headers=alone, timeout=60)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_two_salts_of_a_tenant_share_nothing(tenanted: Tenanted) -> None:
    text = TEXT.replace("one", "three")
    assert tenanted.details("acme", text, cache_salt="a")["cached_tokens"] == 0
    assert tenanted.details("acme", text, cache_salt="b")["cached_tokens"] == 0
    assert tenanted.details("acme", text)["cached_tokens"] == 0
    assert tenanted.details("acme", text, cache_salt="a")["cached_tokens"] > 256


def test_a_tenant_that_leases_all_it_can_leaves_room_for_the_next(tenanted: Tenanted) -> None:
    def lease(tenant: str, number: int) -> dict[str, Any]:
        text = f"{number} {tenant} " + TEXT
        (lease,) = tenanted.details(tenant, text, prompt_cache_options={"ttl": "30m"})["cache_leases"]
        return dict(lease)

    refused = {"status": "refused", "reason": "tenant_share"}
    assert any(lease("acme", number) == refused for number in range(200))
    assert lease("beta", 0)["status"] == "granted"


def test_what_one_has_made_is_to_another_as_if_it_had_never_been(tenanted: Tenanted) -> None:
    response = tenanted.post("acme", "/v1/responses", model="toy", input="Hello", max_output_tokens=2)
    made = tenanted.post(
        "acme", "/v1/caches", model="toy", messages=[{"role": "user", "content": TEXT}], ttl=60
    )
    paths = {
        f"/v1/responses/{response.json()['id']}": f"/v1/responses/resp_{'0' * 24}",
        f"/v1/caches/{made.json()['id']}": f"/v1/caches/cache_{'0' * 32}",
    }
    for path, unknown in paths.items():
        assert tenanted.get("acme", path).status_code == 200
        theirs, never = tenanted.get("beta", path), tenanted.get("beta", unknown)
        assert theirs.status_code == never.status_code == 404
        assert _without_id(theirs, path) == _without_id(never, unknown)
    for path in ("/v1/caches", "/v1beta/cachedContents"):
        assert response.json()["id"] not in tenanted.get("beta", path).text
        assert made.json()["id"] not in tenanted.get("beta", path).text
    goes_on = tenanted.post(
        "beta",
        "/v1/responses",
        model="toy",
        input="And?",
        previous_response_id=response.json()["id"],
        max_output_tokens=2,
    )
    assert goes_on.status_code == 400 and "not found" in goes_on.text
    used = tenanted.post("beta", "/v1/chat/completions", model="toy", messages=[], cache=made.json()["id"])
    assert used.status_code == 404


def _without_id(answer: httpx.Response, path: str) -> str:
    return answer.text.replace(path.rpartition("/")[2], "ID")
