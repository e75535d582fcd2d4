"""The wheel: what is in it, and that its `kvasir` works where there is no checkout."""

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = ["shared-prefix", "--limit", "12", "--seed", "1"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `kvasir` of an environment that has the wheel, and of this one only what was installed into it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "the_rest.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin" / "kvasir"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    replica = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096, "simulated_speed": 4.0}
    with local_stack(replica_settings=replica) as running:
        yield running


def said(kvasir: Path, *words: str) -> str:
    """What a command prints, run where nothing of ours lies about."""
    ran = subprocess.run([kvasir, *words], cwd=kvasir.parent, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return ran.stdout


def test_the_wheel_has_every_package_and_the_toy_model(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"cluster", "loadtests", "replicas", "router"}
    of_pages = {
        "router/features/live_page/page/index.html",
        *(f"loadtests/reports/page.{each}" for each in ("css", "html.jinja")),
    }
    assert of_pages <= set(names)
    assert {"replicas/toy_model/model.safetensors", "replicas/toy_model/tokenizer.json"} <= set(names)


def test_nothing_of_the_checkout_is_within_its_reach(installed: Path) -> None:
    code = "import cluster, loadtests, replicas, router\n"
    code += "for each in (cluster, loadtests, replicas, router): print(each.__file__)"
    python = installed.with_name("python")
    found = subprocess.run(
        [python, "-c", code], cwd=installed.parent, capture_output=True, text=True, check=True
    )
    assert all(Path(line).is_relative_to(installed.parent.parent) for line in found.stdout.splitlines())


def test_simulate_works_from_the_wheel(installed: Path) -> None:
    assert "--policy" in said(installed, "simulate", "--help")
    assert "kvasir" in said(installed, "simulate", *WORKLOAD, "--replicas", "2", "--jobs", "1")


def test_replay_works_from_the_wheel(installed: Path, stack: LocalStack, tmp_path: Path) -> None:
    assert "--url" in said(installed, "replay", "--help")
    report = tmp_path / "report.json"
    said(installed, "replay", *WORKLOAD, "--url", stack.url, "--scale-tokens", "0.1", "--json", str(report))
    assert json.loads(report.read_text(encoding="utf-8"))["report"]["num_answered"] == 12
