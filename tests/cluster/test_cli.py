"""The command line: what it refuses, and with which words."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from cluster.cli import main
from cluster.config import FleetSpec, PoolSpec
from cluster.errors import ClusterError
from cluster.local.local_cluster import LocalOptions, by_role
from cluster.role_complaints import role_complaints
from cluster.sizes import size

HEAVY = ("ray", "torch", "grpc", "httpx", "redis")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["levitate"],
            "join, keys, explain, where, usage, why, lint, loadtest, replay, simulate, docs and test\n",
        ),
        (["up", "--replicas", "0"], "--replicas: needs a whole number from 1 to 512, not 0\n"),
        (["up", "--engine", "steam"], "--engine: invalid choice: 'steam' (choose from"),
        (["up", "--model", "/nonexistent"], "kvasir: there is no checkpoint directory /nonexistent\n"),
        (["up", "--policy", "chance"], "kvasir: there is no policy chance; there are "),
        (["up", "--set", "block_sise=3"], "kvasir: unknown setting block_sise; did you mean block_size?\n"),
        (
            ["up", "--set", "block_size=big"],
            "kvasir: setting block_size cannot be 'big'; it takes a whole number\n",
        ),
        (
            ["up", "--set", "redis_url=x"],
            "kvasir: --set cannot change redis_url: use the environment variable",
        ),
        (["up", "--ram", "much"], "--ram: needs a size such as 256GB or 512MiB, not much\n"),
        (
            ["up", "--disk", "2GiB"],
            "kvasir: --disk needs --ram, through which KV goes to the disk and back\n",
        ),
        (
            ["up", "--ram", "900TiB", "--replicas", "3"],
            "kvasir: --ram 900 TiB for each of 3 replicas is more than the ",
        ),
        (["up", "--set", "host_kv_bytes=1"], "kvasir: --set cannot change host_kv_bytes: use --ram\n"),
        (
            ["up", "--set", "kv_folder=/srv"],
            "kvasir: --set cannot change kv_folder: kvasir up keeps KV in its",
        ),
        (
            ["up", "--engine", "simulated", "--ram", "1MiB"],
            "kvasir: setting host_kv_bytes is for the engines torch and vllm, not for simulated\n",
        ),
        (["up", "--prefill", "0"], "--prefill: needs a whole number from 1 to 512, not 0\n"),
        (
            ["up", "--prefill", "2"],
            "kvasir: --prefill 2 leaves none of 2 replicas to decode: give more --replicas\n",
        ),
        (
            ["up", "--prefill", "1", "--engine", "simulated"],
            "kvasir: --prefill is for torch and vllm: simulated has no KV to pull\n",
        ),
        (
            ["up", "--prefill", "1", "--engine", "openai", "--join", "http://127.0.0.1:1"],
            "kvasir: --prefill is for replicas of ours: roles of servers stand in a fleet file\n",
        ),
        (
            ["up", "--prefill", "1", "--ram", "900TiB"],
            "kvasir: --ram 900 TiB for each of 2 replicas is more than the ",
        ),
        (
            ["up", "--prefill", "1", "--set", "pull_bytes_per_second=none"],
            "kvasir: --prefill would split no prompt, because it does not pull (pull_bytes_per_second)\n",
        ),
        (["up", "--set", "role=prefill"], "kvasir: --set cannot change role: use --prefill\n"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence_and_code_2(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] in ("up", "chat"):
        words = [*words, "--run-dir", str(tmp_path)]
    try:
        code = main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err


@pytest.mark.parametrize(
    ("words", "ram", "speed"),
    [("", 2**28, 5e8), ("--ram 1GiB", 2**30, 5e8), ("--set pull_bytes_per_second=1e10", 2**28, 1e10)],
)
def test_replicas_that_compute_prompts_for_others_have_what_it_takes(
    words: str, ram: int, speed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[LocalOptions] = []
    monkeypatch.setattr("cluster.commands.up.serve", lambda options, say: taken.append(options) or 0)
    assert main(["up", "--prefill", "2", "--replicas", "5", *words.split(), "--run-dir", str(tmp_path)]) == 0
    (options,) = taken
    first, second = by_role(PoolSpec(5, replica=options.replica), options.num_prefillers)
    assert (first.name, first.num_replicas, first.replica.role) == ("prefill", 2, "prefill")
    assert (second.name, second.num_replicas, second.replica.role) == ("decode", 3, "decode")
    for pool in (first, second):
        assert (pool.replica.host_kv_bytes, pool.replica.pull_bytes_per_second) == (ram, speed)
    assert role_complaints(FleetSpec((first, second))) == []
    assert by_role(PoolSpec(5), 0) == (PoolSpec(5),)


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("status", ""),
        ("usage", " or give --url"),
        ("replay shared-prefix", " or give --url"),
        ("where Hello", " or give --redis-url"),
        ("keys list", " or say with --file which keys are meant"),
    ],
)
def test_without_a_cluster_there_is_a_sentence_and_code_1(
    command: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--run-dir", str(tmp_path)]) == 1
    start = f"start one with ./kvasir up --run-dir {tmp_path}"
    assert capsys.readouterr().err == f"kvasir: no cluster runs in {tmp_path}; {start}{remedy}\n"


@pytest.mark.parametrize("command", ["join", "fleet apply"])
def test_the_environment_says_which_redis_so_that_no_argument_shows_its_password(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", "rubbish://me:hidden@redis:1/0")
    for words, named in (([], "rubbish://"), (["--redis-url", "given://a"], "given://")):
        assert main([*command.split(), "deploy/fleet.yaml", *words]) in (1, 2)
        said = capsys.readouterr().err
        assert f"redis_url begins with redis:// or rediss://, not as {named}" in said
        assert "hidden" not in said


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["status", "--run-dir", "/nonexistent"]])
def test_help_and_status_import_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys\nfrom cluster.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_fleet_whose_secret_others_may_read_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_ray(*_: object) -> NoReturn:
        raise ClusterError("no Ray here")

    monkeypatch.setattr("cluster.commands.fleet.connected", no_ray)
    secret, file = tmp_path / "secret", tmp_path / "fleet.yaml"
    secret.write_text("5e" * 32)
    pool = {"name": "small", "settings": {"model": "/models/small"}}
    content = {"redis_url": "redis://127.0.0.1:6379/0", "secret_file": str(secret), "pools": [pool]}
    file.write_text(yaml.safe_dump(content))
    for mode in (0o644, 0o600):
        secret.chmod(mode)
        assert main(["fleet", "apply", str(file)]) == 2
        assert (f"{secret} has mode 0644" in capsys.readouterr().out) == (mode == 0o644)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["up", "--help"],
        ["loadtest", "--help"],
        ["keys", "list"],
        ["down"],
        ["lint"],
        ["levitate"],
    ],
)
@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    words: list[str], is_unbuffered: bool, tmp_path: Path
) -> None:
    keys, log = tmp_path / "keys.json", tmp_path / "requests.jsonl"
    assert main(["keys", "create", "--file", str(keys), "--tenant", "acme"]) == 0
    log.write_text('{"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}\n')
    needed = {"keys": ["--file", str(keys)], "down": ["--run-dir", str(tmp_path)], "lint": [str(log)]}
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *(["-u"] if is_unbuffered else []), "-P", "-m", "cluster.cli", *words]
    with os.fdopen(writing, "w") as output:
        ran = subprocess.run(
            [*command, *needed.get(words[0], [])],
            **{"stdout": output, "stderr": subprocess.PIPE, "text": True, "check": False},
        )
    if words == ["levitate"]:
        assert ran.stderr.startswith("kvasir: there is no command levitate")
    else:
        assert ran.stderr == ""
        assert ran.returncode == 141 or "--help" in words, "argparse itself passes over what it cannot write"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["docs", "--help"], 0, "./kvasir docs --build"),
        (
            ["up", "--engine", "vllm", "--model", "/none"],
            1,
            "kvasir: there is no checkpoint directory /none\n",
        ),
        (["up", "--model=/none", "--engine=vllm"], 1, "kvasir: there is no checkpoint directory /none\n"),
    ],
)
def test_the_script_says_what_needs_no_environment_without_making_one(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    script = Path(__file__).resolve().parents[2] / "kvasir"
    environment = {**os.environ, "KVASIR_VENV": str(tmp_path / "venv")}
    ran = subprocess.run([script, *words], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == code and said in ran.stdout + ran.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("1B", 1), ("2kB", 2000), ("2KiB", 2048), ("1.5GiB", 3 * 2**29), ("256GB", 256 * 10**9)],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1gb", "nan", "infB", "0"])
def test_what_is_no_size_gets_a_sentence(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="needs a size such as 256GB or 512MiB, not"):
        size(text)
