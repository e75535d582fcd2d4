"""Local folders of wheels that pip has been told of: where they have torch, no other torch is asked for."""

import subprocess
import sys
from pathlib import Path


def wheel_folders() -> list[Path]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    values = [
        line.partition("=")[2].strip("'") for line in listed.stdout.splitlines() if "find-links" in line
    ]
    folders = {Path(folder) for value in values for folder in value.split()}
    return sorted(folder for folder in folders if folder.is_dir())


def wheel_options() -> list[str]:
    """What a build of an image with torch is told of them."""
    folders = [folder for folder in wheel_folders() if list(folder.glob("torch-*.whl"))]
    if not folders:
        return []
    mounts = [word for folder in folders for word in ("--volume", f"{folder}:{folder}:ro")]
    listed = ",".join(str(folder) for folder in folders)
    return [*mounts, "--build-arg", "TORCH_BACKEND=", "--build-arg", f"UV_FIND_LINKS={listed}"]
