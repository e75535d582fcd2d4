"""The cluster that is recorded: replicas with scripted answers, two routers, one of them with keys.

Owns the processes, the models' files, the tenants and what Redis was told.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.stacks.local_stack import free_port
from tests.oracle.asked import RULES
from tests.redis_server import RedisServer
from tests.talking_model import make_talking_model

SECRET = "0f" * 32
TALKING, SEEING, TOY, SMALL = "talking", "seeing", "toy_model", "small"
NUM_TOYS = 3
NUM_REPLICAS = NUM_TOYS + 3
NUM_BLOCKS = 65_536
"""Much more than is asked, so that caches are never full."""
SMALL_NUM_BLOCKS = 512
UNTIMED = """\
import runpy, time
clock, time.perf_counter = time.perf_counter, lambda: 0.0
import replicas.loop
time.perf_counter = clock
runpy.run_module("replicas", run_name="__main__", alter_sys=True)
"""
"""A replica that measures no speed of its steps: by that, the moment would decide where requests go."""
INDEX_STRIDE = 16
"""Every block is in the index. With a longer one, what a router knows of a short prompt that is asked twice
depends on the moment."""

SIMULATED: Mapping[str, object] = {
    "engine": "simulated",
    "simulated_hardware": "instant",
    "num_blocks": NUM_BLOCKS,
    "lease_seconds": 20,
    "engine_hang_seconds": 100_000,  # steps that take no time are none for the watchdog
}
READY_SECONDS = 300.0
END_SECONDS = 60.0

SEEING_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SEEING_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

TENANTS: Mapping[str, Mapping[str, Any]] = {
    "acme": {"limits": {"lease_share": 0.5}},
    "bell": {"groups": ["pool"], "weight": 2.0},
    "cole": {"groups": ["pool", "other"], "slo_seconds": 30.0},
    "poor": {"limits": {"requests_per_minute": 5, "tokens_per_minute": 3000, "max_context": 200}},
    "tiny": {"limits": {"tokens_per_minute": 30}},
    "lone": {"limits": {"max_sequences": 2}},
}
KEYS: Mapping[str, Mapping[str, Any]] = {
    "admin": {"tenant": "acme", "rights": ["admin"]},
    "acme": {"tenant": "acme", "name": "first"},
    "acme_two": {"tenant": "acme", "rights": ["explain", "priority"]},
    "bell": {"tenant": "bell"},
    "cole": {"tenant": "cole"},
    "poor": {"tenant": "poor"},
    "tiny": {"tenant": "tiny"},
    "lone": {"tenant": "lone"},
    "bound": {"tenant": "acme", "limits": {"requests_per_minute": 3}},
    "late": {"tenant": "acme", "expires": "2020-01-01T00:00:00Z"},
}


def key_of(name: str) -> str:
    """The same in every recording."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"sk-kvasir-{digest[:12]}-{digest[12:55]}"


@dataclass(frozen=True)
class Cluster:
    """`urls` are those of a router without keys (`open`), of one with, and of a replica's metrics."""

    redis_url: str
    urls: Mapping[str, str]
    processes: Mapping[str, subprocess.Popen[bytes]]

    def end(self, name: str) -> None:
        process = self.processes[name]
        process.terminate()
        process.wait(END_SECONDS)


@contextlib.contextmanager
def cluster(folder: Path, checkout: Path) -> Iterator[Cluster]:
    """Of that checkout's code. Files and logs are in the folder."""
    secret, script, keys = folder / "secret", folder / "script.json", folder / "keys.json"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    script.write_text(json.dumps([{"when": when, "say": say} for when, say in RULES.items()]))
    _write_keys(keys)
    (folder / "untimed_replica.py").write_text(UNTIMED)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.closing(RedisServer()) as redis_server, _ended(processes):
        redis_server.start()
        shared = {"redis_url": redis_server.url, "secret_file": secret, "index_stride": INDEX_STRIDE}

        def start(module: str, name: str, settings: Mapping[str, object]) -> None:
            flags = [f"--{key.replace('_', '-')}={value}" for key, value in {**shared, **settings}.items()]
            environment = {**os.environ, "PYTHONPATH": f"{checkout}:{folder}"}
            with (folder / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", module, *flags]
                processes[name] = subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=log, stderr=log
                )

        ports = {name: free_port() for name in ("open", "keyed", "replica")}
        for name, settings in _replicas(folder, script, ports["replica"]).items():
            start("untimed_replica", name, {**SIMULATED, **settings, "replica_id": name})
        patient = {"history_wait_seconds": 10, "poll_seconds": 0.1}
        start("router", "open", {**patient, "port": ports["open"]})
        allowed = {"cors_origins": "https://chat.example.org", "keys_file": keys}
        start("router", "keyed", {**patient, **allowed, "port": ports["keyed"]})
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        ends = time.monotonic() + READY_SECONDS
        while not (_knows_all(urls["open"]) and _knows_all(urls["keyed"])):
            if time.monotonic() > ends or any(process.poll() is not None for process in processes.values()):
                logs = (path.read_text()[-2000:] for path in folder.glob("*.log"))
                raise RuntimeError("the cluster does not start:\n" + "\n".join(logs))
            time.sleep(0.05)
        yield Cluster(redis_server.url, urls, processes)


@contextlib.contextmanager
def _ended(processes: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _replicas(folder: Path, script: Path, metrics_port: int) -> Mapping[str, Mapping[str, object]]:
    talking = {"model": make_talking_model(folder / TALKING), "simulated_script": script}
    seeing = {"model": _make_seeing_model(folder / SEEING), "simulated_script": script}
    return {
        "talking-0": talking,
        "seeing-0": {**seeing, "metrics_port": metrics_port},
        **{f"toy-{number}": {} for number in range(NUM_TOYS)},
        "small-0": {"num_blocks": SMALL_NUM_BLOCKS, "model_name": SMALL},
    }


def _knows_all(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(httpx.get(f"{url}/ready").json().get("num_replicas") == NUM_REPLICAS)
    return False


def _make_seeing_model(folder: Path) -> Path:
    """The talking model's files with an image rule of Qwen's."""
    make_talking_model(folder)
    config, tokenizer, words = (
        folder / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    vocabulary = json.loads(tokenizer.read_text("utf-8"))
    first = 1 + max(token["id"] for token in vocabulary["added_tokens"])
    for token_id, mark in enumerate(SEEING_MARKS, first):
        as_others = vocabulary["added_tokens"][0]
        vocabulary["added_tokens"].append(as_others | {"id": token_id, "content": mark, "special": True})
    tokenizer.write_text(json.dumps(vocabulary), "utf-8")
    content = json.loads(config.read_text("utf-8")) | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "image_token_id": first + 1,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
    }
    config.write_text(json.dumps(content), "utf-8")
    images = {"patch_size": 14, "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessorFast"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    changed = json.loads(words.read_text("utf-8")) | {"chat_template": SEEING_TEMPLATE}
    words.write_text(json.dumps(changed), "utf-8")
    return folder


def _write_keys(path: Path) -> None:
    keys = []
    for name, more in KEYS.items():
        text = key_of(name)
        digest = hashlib.sha256(text.encode()).hexdigest()
        keys.append({"key_id": text.split("-")[2], "sha256": digest, **more})
    path.write_text(json.dumps({"tenants": TENANTS, "keys": keys}))
    path.chmod(0o600)
