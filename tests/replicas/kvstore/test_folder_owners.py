"""Owners and modes of the folder and of those in it: what others could have made is not used."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicas.kvstore.on_disk.disk import Disk
from replicas.kvstore.on_disk.folder import Folder
from replicas.kvstore.on_disk.other_layouts import erase_folder
from replicas.process.settings import SettingsError
from tests.replicas.kvstore.open_disk import file_of, opened, options

NOBODY = 65534
as_superuser = pytest.mark.skipif(os.geteuid() != 0, reason="needs the superuser, who may give folders away")
Spoil = Callable[[Path], None]

SPOILT = [
    pytest.param(lambda place: place.chmod(0o770), id="0770"),
    pytest.param(lambda place: place.chmod(0o711), id="0711"),
    pytest.param(lambda place: place.chmod(0o704), id="0704"),
    pytest.param(lambda place: os.chown(place, NOBODY, NOBODY), id="another user's", marks=as_superuser),
]


def refusal(path: Path) -> str:
    with pytest.raises(SettingsError) as refused:
        Disk(options(path))
    sentence = str(refused.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence


@pytest.mark.parametrize("mode", [0o777, 0o2770, 0o755, 0o700])
def test_an_empty_folder_of_ours_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    Folder(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_in_use_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    Folder(tmp_path).close()
    tmp_path.chmod(mode)
    assert f"(mode {mode:04o}); give it mode 0700" in refusal(tmp_path)
    tmp_path.chmod(0o755)
    Folder(tmp_path).close()


@as_superuser
@pytest.mark.parametrize("is_marked", [True, False])
def test_another_users_folder_is_refused(tmp_path: Path, is_marked: bool) -> None:
    if is_marked:
        Folder(tmp_path).close()
    os.chown(tmp_path, NOBODY, NOBODY)
    assert f"belongs to user {NOBODY}, and the replica runs as {os.geteuid()}" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["version", "layout"])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_folder_below_it_is_refused(tmp_path: Path, place: str, spoil: Spoil) -> None:
    with opened(tmp_path) as at:
        at.write("a")
    spoil(file_of(tmp_path, "a").parents[3 if place == "version" else 2])
    assert "both must be folders, no links, of the user that the replica runs as" in refusal(tmp_path)
    assert erase_folder(tmp_path) == 0
    assert file_of(tmp_path, "a").exists(), "what may be another's is not erased"


@pytest.mark.parametrize("place", ["upper", "leaf"])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_chunk_in_a_spoilt_folder_is_a_miss_and_is_not_replaced(
    tmp_path: Path, place: str, spoil: Spoil
) -> None:
    with opened(tmp_path) as at:
        at.write("a")
        assert at.has("a")
        spoil(file_of(tmp_path, "a").parents[1 if place == "upper" else 0])
        assert not at.has("a")
        before = file_of(tmp_path, "a").stat().st_ino
        assert not at.write("a").ok
        assert file_of(tmp_path, "a").stat().st_ino == before


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can get to."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


IN_A_VOLUME = """
import os, subprocess, sys
from pathlib import Path
from tests.replicas.kvstore.open_disk import opened

path, mode, user = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
how = f"size=16m,mode={mode},uid=0,gid={user}"
if subprocess.run(["mount", "-t", "tmpfs", "-o", how, "kv", path]).returncode:
    sys.exit(77)
os.setresgid(user, user, user)
os.setresuid(user, user, user)
for expected in (False, True):
    with opened(path) as at:
        assert at.has("a") is expected
        at.write("a")
print(oct(path.stat().st_mode), oct((path / "v1").stat().st_mode & 0o777))
"""


@as_superuser
@pytest.mark.parametrize("mode", ["2770", "2777"])
def test_a_volume_of_roots_that_others_can_write_to_is_used(reachable: Path, mode: str) -> None:
    """As Kubernetes makes them for a group."""
    child = [sys.executable, "-c", IN_A_VOLUME, str(reachable), mode, str(NOBODY)]
    done = subprocess.run(["unshare", "--mount", *child], capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody mount")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [oct(0o40000 | int(mode, 8)), oct(0o700)]


@as_superuser
@pytest.mark.parametrize("mode", [0o2770, 0o777])
def test_a_folder_of_roots_that_is_no_volume_is_refused_if_others_can_write_to_it(
    reachable: Path, mode: int
) -> None:
    path = reachable / "kv"
    path.mkdir()
    path.chmod(mode)
    opening = "import os,sys;from pathlib import Path;from replicas.kvstore.on_disk.folder import Folder;"
    opening += f"os.setresgid(0, 0, 0); os.setresuid({NOBODY}, {NOBODY}, {NOBODY}); Folder(Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", opening, str(path)], capture_output=True, text=True, timeout=120
    )
    assert f"can be written to by others than its owner (mode {mode:04o})" in done.stderr
