"""deploy/two-machines.md: the commands that it gives are commands that there are."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml

from cluster import fleet
from cluster.fleet_file import parse_fleet
from replicas.protocol.settings import load_settings
from router.config import ENVIRONMENT_PREFIX, RouterConfig
from tests.deploy.dockerfile import ROOT

PAGE = (ROOT / "deploy/two-machines.md").read_text(encoding="utf-8")
BARE_MACHINES = (ROOT / "deploy/ray-cluster.yaml").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def words_after(start: str) -> list[list[str]]:
    """The arguments of every command of the page that begins so."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    found = [line.partition(start)[2] for line in lines if start in line]
    return [shlex.split(re.sub(r"[>&|].*", "", rest)) for rest in found]


def test_every_command_of_the_fleet_is_one() -> None:
    commands = words_after("./kvasir fleet ")
    assert [words[0] for words in commands] == ["apply", "status", "stop"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    fleet.add_arguments(parser)
    for words in commands:
        parser.parse_args(words)
    for name in re.findall(r"kvasir fleet (\w+)", PAGE + BARE_MACHINES):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([name, "--help"])
        assert ended.value.code == 0, name


def test_the_routers_flags_are_settings() -> None:
    (words,) = words_after("python -m router ")
    config = load_settings(
        RouterConfig, arguments=words, environment={}, prefix=ENVIRONMENT_PREFIX, program="", description=""
    )
    assert config.secret_file == "cluster-secret"


def test_the_fleet_that_it_shows_is_one() -> None:
    (text,) = blocks("yaml")
    spec = parse_fleet(text, redis_url="redis://:secret@10.0.0.1:6380/0")
    assert [pool.num_replicas for pool in spec.pools] == [2]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "deploy" / target).exists(), target


def test_both_ways_to_start_ray_use_one_port_and_one_token() -> None:
    config = yaml.safe_load(BARE_MACHINES)
    assert any("--port=6379" in command for command in config["head_start_ray_commands"])
    assert "--port=6379" in PAGE
    token = Path("~/.ray/auth_token")
    assert str(token) in config["file_mounts"]
    assert str(token) in PAGE
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token" in command for command in starts if "ray start" in command)
    assert "export RAY_AUTH_MODE=token" in PAGE
