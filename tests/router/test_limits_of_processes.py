"""A tenant's limit over several router processes: what they admit together."""

import json
import time
from pathlib import Path

import httpx
import pytest

from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, local_stack
from router.caller import Limits, Tenant

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

PER_MINUTE = 2
NUM_ROUTERS = 2
BODY = {"model": "toy_model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def ask(stack: LocalStack, key: str) -> httpx.Response:
    """On a connection of its own, which the kernel gives to one of the routers."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)


def test_two_processes_admit_one_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    tenant = Tenant(name="limited", limits=Limits(requests_per_minute=PER_MINUTE))
    key = write_key_file(path, [tenant])[tenant.name]
    replica = {"engine": "simulated", "simulated_hardware": "instant"}
    router = {"processes": NUM_ROUTERS, "keys_file": path}
    with local_stack(replica_settings=replica, router_settings=router) as stack:
        started, num_admitted, num_refused = time.monotonic(), 0, 0
        while num_refused < 8:  # so that both are asked
            answer = ask(stack, key)
            if answer.status_code == 200:
                num_admitted += 1
                time.sleep(1.5)  # longer than news take
            else:
                assert answer.status_code == 429, answer.text
                assert json.loads(answer.text)["error"]["code"] == "rate_limit_exceeded"
                num_refused += 1
        elapsed = time.monotonic() - started
        assert PER_MINUTE <= num_admitted <= PER_MINUTE * (1 + elapsed / 60) + 1
