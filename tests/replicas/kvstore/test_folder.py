"""The folder: whose it is, who has it, owners and modes in it, and what is left when it is erased."""

import errno
import fcntl
import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.kvstore.on_disk import folder as folder_module
from replicas.kvstore.on_disk.disk import Disk
from replicas.kvstore.on_disk.folder import LOCK, MARKER, Folder
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


def refused(path: Path) -> str:
    """The sentence with which the folder is refused."""
    before = sorted(path.iterdir()) if path.is_dir() else None
    with pytest.raises(SettingsError) as refusal:
        Disk(options(path))
    assert before is None or sorted(path.iterdir()) == before, "what is refused is left as it was"
    sentence = str(refusal.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence


def test_a_folder_is_made_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two"
    for _ in range(2):
        folder = Folder(path)
        assert path.stat().st_mode & 0o777 == 0o700
        assert sorted(os.listdir(path)) == [MARKER, LOCK]
        folder.close()
        folder.close()


def test_backups_know_that_it_is_a_cache(tmp_path: Path) -> None:
    Folder(tmp_path).close()
    assert (tmp_path / MARKER).read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    Folder(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [MARKER, "lost+found", LOCK]


@pytest.mark.parametrize("left", [[LOCK], [LOCK, ".tmp-0"], [".tmp-0", ".tmp-1"]])
def test_what_one_that_died_as_it_began_has_left_is_ours(tmp_path: Path, left: list[str]) -> None:
    for each in left:
        (tmp_path / each).touch()
    Folder(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [MARKER, LOCK]


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "holds what Kvasir has not written, such as 'thesis.txt'" in refused(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("text", [b"", b"Signature: 8a477f597d28d172789f06886806bc55\n", b"x" * 9999])
def test_another_programs_cache_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MARKER).write_bytes(text)
    assert "another program" in refused(tmp_path)


def test_a_marker_that_is_a_link_proves_nothing(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    Folder(ours).close()
    other = tmp_path / "other"
    other.mkdir()
    (other / MARKER).symlink_to(ours / MARKER)
    assert "another program" in refused(other)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "there is a file in its place" in refused(tmp_path / "file")
    assert "there is a file in its place" in refused(tmp_path / "file" / "below")


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    assert "is a symbolic link" in refused(tmp_path / "link")
    (tmp_path / "nowhere").symlink_to("missing")
    assert str(tmp_path / "nowhere") in refused(tmp_path / "nowhere")


@pytest.mark.parametrize("below", ["v1", "v1/LAYOUT"])
def test_a_link_below_it_is_not_followed(tmp_path: Path, below: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = tmp_path / "kv"
    Folder(path).close()
    place = path / below.replace("LAYOUT", options(path).layout.hex())
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises(SettingsError, match="no folder that can be used"):
        Disk(options(path))
    Folder(path).close()
    assert not list(elsewhere.iterdir())


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can get to."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_that_is_not_writable_is_refused(reachable: Path, mode: int) -> None:
    path = reachable / "kv"
    path.mkdir()
    path.chmod(mode)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_open_as_nobody, args=(path, there))
    child.start()
    sentence = here.recv()
    child.join()
    path.chmod(0o755)
    assert sentence.startswith(f"the KV folder {path} cannot be ") and "Permission denied" in sentence


def _open_as_nobody(path: Path, connection: Any) -> None:
    """Modes do not bind the superuser."""
    if os.getuid() == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        Folder(path)
    except SettingsError as error:
        connection.send(str(error))
    else:
        connection.send("opened")


def _hold(path: Path, connection: Any) -> None:
    folder = Folder(path)
    connection.send("held")
    connection.recv()
    folder.close()


def test_a_second_replica_is_refused_as_long_as_the_first_lives(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=_hold, args=(tmp_path, there))
    holder.start()
    try:
        assert here.recv() == "held"
        assert "is in use by another replica" in refused(tmp_path)
        with pytest.raises(SettingsError, match="in use by another replica"):
            erase_folder(tmp_path)
    finally:
        holder.kill()
        holder.join()
    Folder(tmp_path).close()


def test_a_second_disk_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        assert "is in use by another replica" in refused(tmp_path)
        at.write("a")
    with opened(tmp_path) as at:
        assert at.has("a")


@pytest.mark.parametrize(
    ("broken", "sentence"), [("flock", "without locks"), ("rename", "written and renamed")]
)
def test_a_file_system_without_locks_or_renaming_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, sentence: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(*((fcntl, broken) if broken == "flock" else (os, broken)), fails)
    with pytest.raises(SettingsError, match=sentence) as refusal:
        Folder(tmp_path)
    assert "Operation not supported" in str(refusal.value)


def test_a_full_disk_that_holds_our_kv_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder(tmp_path / "kv").close()

    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folder_module.os, "write", is_full)
        Folder(tmp_path / "kv").close()
        assert "No space left" in refused(tmp_path / "new")
    Folder(tmp_path / "kv").close()
    assert sorted(os.listdir(tmp_path / "kv")) == [MARKER, LOCK]


def test_every_descriptor_is_given_back(tmp_path: Path) -> None:
    gc.collect()  # what other tests have left would be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").touch()
    for _ in range(3):
        with opened(tmp_path / "kv") as at:
            at.write("a")
            at.has("a")
            at.has("b")
            at.compared()
            refused(tmp_path / "kv")
        refused(tmp_path / "foreign")
        erase_folder(tmp_path / "kv")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_erasing_takes_all_of_ours_and_leaves_what_is_not(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        at.write("a")
        used = at.disk.bytes_used
    theirs = [tmp_path / "notes.txt", tmp_path / "v1" / "notes.txt", tmp_path / "v2x" / "a.kv"]
    theirs.append(next(tmp_path.glob("v1/*/*/*")) / "notes.kv")
    for each in theirs:
        each.parent.mkdir(exist_ok=True)
        each.write_text("theirs")
    (tmp_path / "v7").mkdir()
    (tmp_path / "v7" / "link").symlink_to(tmp_path / "v2x")
    assert erase_folder(tmp_path) == used
    left = sorted(each for each in tmp_path.rglob("*") if each.is_symlink() or not each.is_dir())
    assert left == sorted([*theirs, tmp_path / "v7" / "link"])


def test_erasing_refuses_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SettingsError, match="has not written"):
        erase_folder(tmp_path)


def test_a_lock_that_was_erased_as_it_was_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, erased = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        if not erased:
            erased.append(fd)
            os.unlink(tmp_path / LOCK)

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = Folder(tmp_path)
    assert erased and (tmp_path / LOCK).exists()
    with pytest.raises(SettingsError, match="in use"):
        Folder(tmp_path)
    folder.close()


@pytest.mark.parametrize("mode", [0o777, 0o2770, 0o755, 0o700])
def test_an_empty_folder_of_ours_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    Folder(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_in_use_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    Folder(tmp_path).close()
    tmp_path.chmod(mode)
    assert f"(mode {mode:04o}); give it mode 0700" in refused(tmp_path)
    tmp_path.chmod(0o755)
    Folder(tmp_path).close()


@as_superuser
@pytest.mark.parametrize("is_marked", [True, False])
def test_another_users_folder_is_refused(tmp_path: Path, is_marked: bool) -> None:
    if is_marked:
        Folder(tmp_path).close()
    os.chown(tmp_path, NOBODY, NOBODY)
    assert f"belongs to user {NOBODY}, and the replica runs as {os.geteuid()}" in refused(tmp_path)


@pytest.mark.parametrize("place", ["version", "layout"])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_folder_below_it_is_refused(tmp_path: Path, place: str, spoil: Spoil) -> None:
    with opened(tmp_path) as at:
        at.write("a")
    spoil(file_of(tmp_path, "a").parents[3 if place == "version" else 2])
    assert "both must be folders, no links, of the user that the replica runs as" in refused(tmp_path)
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
