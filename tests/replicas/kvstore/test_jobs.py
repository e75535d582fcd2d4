"""The queue of jobs: priorities, one key's jobs in order, what is late, and its books after any history."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.kvstore.on_disk.jobs import DiskJob, JobQueue, Kind, State
from tests.examples import examples
from tests.replicas.kvstore.chunk_names import key

BYTES = 10


def job(kind: Kind, path: str | None, number: int = 0, asked_at: float = 0.0) -> DiskJob:
    growth = {Kind.WRITE: BYTES, Kind.REMOVE: -BYTES}.get(kind, 0)
    wanted = None if path is None else key(path)
    return DiskJob(kind, number, asked_at, wanted, num_bytes=BYTES, growth=growth)


class AnyHistory(RuleBasedStateMachine):
    """Against a list of all jobs in the order in which they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = JobQueue()
        self.jobs: list[DiskJob] = []
        self.claims: set[str] = set()
        self.now = 0.0

    @rule(kind=st.sampled_from([Kind.READ, Kind.WRITE, Kind.REMOVE]), path=st.sampled_from("abc"))
    def add(self, kind: Kind, path: str) -> None:
        self.now += 1.0
        self.jobs.append(job(kind, path, len(self.jobs), self.now))
        self.queue.add(self.jobs[-1])

    @precondition(lambda self: not self.queue.is_erasing)
    @rule()
    def erase(self) -> None:
        self.jobs.append(job(Kind.ERASE, None, len(self.jobs), self.now))
        self.queue.add(self.jobs[-1])

    @rule()
    def take(self) -> None:
        expected = self.may_run()
        taken = self.queue.take(self.now)
        assert (taken is None) == (not expected), "whatever can be done is taken"
        if taken is not None:
            assert taken.state is State.RUNNING and taken in expected
            order = [Kind.ERASE, Kind.READ, Kind.REMOVE, Kind.WRITE]
            assert order.index(taken.kind) == min(order.index(each.kind) for each in expected)

    def may_run(self) -> list[DiskJob]:
        waiting = [each for each in self.jobs if each.state is State.WAITING]
        erasing = [each for each in self.jobs if each.kind is Kind.ERASE and each.state is not State.ENDED]
        if erasing:
            is_quiet = not self.running() and not self.claims
            return [each for each in erasing if is_quiet and each.state is State.WAITING]
        held = {each.key for each in self.running()} | {key(path) for path in self.claims}
        found = []
        for each in waiting:
            if each.key not in held:
                found.append(each)
            held.add(each.key)
        return found

    def running(self) -> list[DiskJob]:
        return [each for each in self.jobs if each.state in (State.RUNNING, State.CLEARING)]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ending = [*self.running(), *(each for each in self.jobs if each.state is State.OVERDUE)]
        if ending:
            self.queue.end(data.draw(st.sampled_from(ending)))

    @rule(age=st.integers(0, 6))
    def expire(self, age: int) -> None:
        alive = [each for each in self.jobs if each.kind is Kind.READ]
        alive = [each for each in alive if each.state in (State.WAITING, State.RUNNING)]
        expected = [each for each in alive if each.asked_at < self.now - age]
        late = []
        for each in self.queue.late_reads(self.now - age):
            late.append(each)
            if each.state is State.RUNNING:
                self.queue.give_up(each)
        assert late == expected

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        reads = [each for each in self.jobs if each.kind is Kind.READ and each.state is State.RUNNING]
        if reads:
            data.draw(st.sampled_from(reads)).state = State.CLEARING

    @rule(path=st.sampled_from("abcd"))
    def claim(self, path: str) -> None:
        busy = {each.key for each in self.running()} | {
            each.key for each in self.jobs if each.state is State.WAITING
        }
        is_free = key(path) not in busy and path not in self.claims and not self.queue.is_erasing
        assert self.queue.claim(key(path)) == is_free
        if is_free:
            self.claims.add(path)

    @precondition(lambda self: self.claims)
    @rule()
    def release(self) -> None:
        self.queue.release(key(self.claims.pop()))

    @rule()
    def drop(self) -> None:
        waiting = {each.number for each in self.jobs if each.state is State.WAITING}
        assert {each.number for each in self.queue.drop_waiting()} == waiting

    @invariant()
    def the_books_are_right(self) -> None:
        waiting = [each for each in self.jobs if each.state is State.WAITING]
        counted = [*waiting, *self.running()]
        to_read = sum(each.num_bytes for each in counted if each.kind is Kind.READ)
        assert self.queue.num_waiting == sum(each.kind in (Kind.READ, Kind.WRITE) for each in waiting)
        assert self.queue.num_running == len(self.running()) + len(self.claims)
        assert self.queue.bytes_to_read == to_read
        assert self.queue.bytes_to_grow == sum(each.growth for each in counted)
        held = {each.key for each in counted} | {key(path) for path in self.claims}
        assert [self.queue.has(key(path)) for path in "abcd"] == [key(path) in held for path in "abcd"]
        alive = [
            each.asked_at for each in counted if each.kind is Kind.READ and each.state is not State.CLEARING
        ]
        assert self.queue.next_deadline() == min(alive, default=None)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
