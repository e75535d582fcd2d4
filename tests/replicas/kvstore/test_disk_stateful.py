"""The disk against a dictionary, with real files: any history of jobs, lives and damage to files."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.kvstore.on_disk.disk import Disk, Kind
from tests.examples import examples
from tests.replicas.kvstore.chunk_images import SLOT_BYTES, fill
from tests.replicas.kvstore.chunk_names import key, name
from tests.replicas.kvstore.open_disk import PATIENCE_SECONDS, OpenDisk, file_of, options

PATHS = ["a", "ab", "abc", "z"]

paths = st.sampled_from(PATHS)


class DiskAgainstADictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.files: dict[str, bool] = {}
        """Each file that is there, in the order of use; whether it is whole."""
        self.leases: dict[str, float] = {}
        self.at = self.open()

    def open(self) -> OpenDisk:
        return OpenDisk(Disk(options(self.folder)), self.folder)

    def gone(self, path: str) -> None:
        self.files.pop(path, None)
        self.leases.pop(path, None)

    @rule(path=paths, sync=st.booleans())
    def write(self, path: str, sync: bool) -> None:
        assert self.at.write(path, sync=sync).ok
        self.files.pop(path, None)
        self.files[path] = True

    @rule(path=paths)
    def read(self, path: str) -> None:
        assert self.at.has(path) == self.files.get(path, False)
        if not self.files.get(path, False):
            self.gone(path)

    @rule(path=paths)
    def remove(self, path: str) -> None:
        self.at.removed(path)
        self.gone(path)

    @rule(jobs=st.lists(st.tuples(st.sampled_from(["write", "read", "remove"]), paths), max_size=8))
    def many_at_once(self, jobs: list[tuple[str, str]]) -> None:
        """All are asked for before the first has ended; those of one chunk are done in their order."""
        expected, numbers = [], []
        for slot, (action, path) in zip(self.at.slots, jobs, strict=False):
            if action == "write":
                numbers.append(self.at.disk.write(fill(slot, path), slot))
                expected.append(True)
                self.files.pop(path, None)
                self.files[path] = True
            elif action == "read":
                numbers.append(self.at.disk.read(key(path), slot))
                expected.append(self.files.get(path, False))
                if not expected[-1]:
                    self.gone(path)
            else:
                self.at.disk.remove([key(path)])
                self.gone(path)
        assert [self.at.ends(number).ok for number in numbers] == expected
        self.at.until(
            lambda: all(file_of(self.folder, each).exists() == (each in self.files) for each in PATHS)
        )
        self.use(list(self.files))

    @rule(used=st.lists(paths, max_size=4))
    def use(self, used: list[str]) -> None:
        self.at.disk.note_use(key(path) for path in used)
        for path in used:
            if path in self.files:
                self.files[path] = self.files.pop(path)

    @precondition(lambda self: self.files)
    @rule(data=st.data(), until=st.sampled_from([0.0, 5.0, 2e9]))
    def lease(self, data: st.DataObject, until: float) -> None:
        path = data.draw(st.sampled_from(sorted(self.files)))
        self.at.disk.note_lease(key(path), until)
        self.leases.pop(path, None)
        if until:
            self.leases[path] = until

    @rule(path=paths, at_byte=st.integers(0, SLOT_BYTES - 1), bit=st.integers(0, 7))
    def damage(self, path: str, at_byte: int, bit: int) -> None:
        """A flipped bit, where bits count."""
        if path in self.files and not at_byte >= 4096 + 5000:
            damaged = bytearray(file_of(self.folder, path).read_bytes())
            damaged[at_byte] ^= 1 << bit
            if self.files[path]:
                file_of(self.folder, path).write_bytes(damaged)
                self.files[path] = False

    @rule(path=paths)
    def delete(self, path: str) -> None:
        """By somebody else; the disk comes to know when it reads."""
        if path in self.files:
            file_of(self.folder, path).unlink()
            assert self.at.read(path).reason == "missing"
            self.gone(path)

    @rule()
    def erase(self) -> None:
        assert self.at.ends(self.at.disk.erase()).ok
        self.files.clear()
        self.leases.clear()

    @rule()
    def live_again(self) -> None:
        self.at.disk.close(PATIENCE_SECONDS)
        self.at = self.open()
        assert list(self.at.disk.restored) == [name(path) for path in self.files]
        leases = {each: lease.until for each, lease in self.at.disk.restored_leases.items()}
        assert leases == {key(path): until for path, until in self.leases.items()}
        self.at.compared()
        assert self.at.disk.take_found() == []
        assert not [each for each in self.at.finished if each.kind is Kind.LOST]

    @rule()
    def live_again_without_a_journal(self) -> None:
        """What is damaged in its header is not found, what is damaged behind it is."""
        self.at.disk.close(PATIENCE_SECONDS)
        next(self.folder.glob("v1/*/journal.log")).unlink()
        self.at = self.open()
        self.at.compared()
        found = {each.key for each in self.at.disk.take_found()}
        assert found >= {key(path) for path, is_whole in self.files.items() if is_whole}
        assert found <= {key(path) for path in self.files}
        for path in [each for each in self.files if key(each) not in found]:
            del self.files[path]
        self.leases.clear()
        self.use(list(self.files))

    @invariant()
    def bytes_are_those_of_the_files(self) -> None:
        self.at.until(lambda: self.at.disk.bytes_used == len(self.files) * SLOT_BYTES)
        assert not self.at.disk.is_off

    def teardown(self) -> None:
        assert self.at.disk.close(PATIENCE_SECONDS)
        shutil.rmtree(self.folder)


TestDiskAgainstADictionary = DiskAgainstADictionary.TestCase
TestDiskAgainstADictionary.settings = settings(
    max_examples=examples(80), stateful_step_count=25, deadline=None
)
