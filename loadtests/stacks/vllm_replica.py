"""A vLLM replica that also serves vLLM's own Prometheus counters, so that ours can be held against them.

Owns the port of the second endpoint. The replica itself is `python -m replicas`, with the same flags; vLLM
counts only where `engine_args` says `disable_log_stats=false`.
"""

import os
import re
import sys
from pathlib import Path

import httpx
from prometheus_client import start_http_server

from loadtests.stacks.local_stack import LocalStack
from replicas.__main__ import main as replica

PORT_FILE = "vllm-metrics-{pid}"
"""In the working directory of the process: the port where its counters are."""


def engine_counters(stack: LocalStack, name: str) -> tuple[int, int]:
    """Tokens that vLLM looked up and found in its prefix cache, by its own counting."""
    port = (stack.run_directory / PORT_FILE.format(pid=stack.pid(name))).read_text(encoding="ascii")
    return read_counters(int(port))


def read_counters(port: int) -> tuple[int, int]:
    """The same of any process that serves vLLM's counters."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return _counter(text, "vllm:prefix_cache_queries_total"), _counter(text, "vllm:prefix_cache_hits_total")


def _counter(text: str, name: str) -> int:
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no {name} among the counters"
    return int(sum(map(float, values)))


def main() -> int:
    server, _ = start_http_server(0, "127.0.0.1")
    Path(PORT_FILE.format(pid=os.getpid())).write_text(str(server.server_port), encoding="ascii")
    return replica(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
