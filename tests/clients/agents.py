"""Claude Code, Codex and OpenCode from npm, unchanged, as tests run them.

Each function that ends in `_at` writes an agent's settings, and returns its command and environment.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import client_environment
from tests.tools import needed_tool, not_here

TURN_SECONDS = 100.0


def run(command: Sequence[str], folder: Path, more: Mapping[str, str]) -> str:
    """What the agent printed, at home in a folder of its own and with none of this machine's settings."""
    needed_tool("node")
    (folder / "home").mkdir(exist_ok=True)
    home = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "NO_PROXY": "*"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**home, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TURN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def codex_at(cluster: LocalStack, folder: Path, more: str = "") -> tuple[str, Mapping[str, str]]:
    """`more` are settings besides."""
    settings = folder / "home" / ".codex" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(
        'model = "talking"\nmodel_provider = "kvasir"\nsandbox_mode = "danger-full-access"\n'
        f"{more}"
        f'[model_providers.kvasir]\nname = "Kvasir"\nbase_url = "{cluster.url}/v1"\n'
        'wire_api = "responses"\nenv_key = "KVASIR_KEY"\n',
        "utf-8",
    )
    return str(client_environment("node") / "node_modules/.bin/codex"), {"KVASIR_KEY": "none"}


def claude_at(cluster: LocalStack) -> tuple[str, Mapping[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": cluster.url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return str(client_environment("node") / "node_modules/.bin/claude"), environment


def opencode_at(cluster: LocalStack, folder: Path, num_context_tokens: int) -> tuple[str, Mapping[str, str]]:
    """It shortens its conversation within 8,000 tokens of the end of that context."""
    limit = {"context": num_context_tokens, "output": 8_000}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{cluster.url}/v1", "apiKey": "none"},
        "models": {"talking": {"limit": limit}},
    }
    model = "kvasir/talking"
    settings = {"model": model, "small_model": model, "provider": {"kvasir": provider}, "permission": "allow"}
    off = {"autoupdate": False, "share": "disabled", "snapshot": False}
    (folder / "opencode.json").write_text(json.dumps({**settings, **off}), "utf-8")
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    command = client_environment("node") / "node_modules/opencode-linux-x64/bin/opencode"
    if not command.exists():
        not_here("npm has OpenCode for x86-64 here, and this machine is another")
    return str(command), environment
