"""Whose blocks a request hit is settled when it is first scheduled, like how many it hit."""

from replicas.protocol.frames import PromptUsage, UserTag
from tests.replicas.builders import FakeModel, engine_request, scheduler

ANN, BOB = UserTag(b"ann"), UserTag(b"bob")


def usages(model: FakeModel, serial: int) -> list[PromptUsage]:
    return [d.usage for d in model.deltas if d.key.number == serial and d.usage is not None]


def test_a_twin_in_the_same_step_reads_what_the_other_user_writes_in_it() -> None:
    twins = FakeModel(scheduler())
    for serial, user in ((1, ANN), (2, BOB), (3, ANN)):
        twins.scheduler.add(engine_request(range(100, 118), serial=serial, user=user, max_tokens=1))
    frame = twins.step()
    assert [delta.usage for delta in frame.deltas] == [
        PromptUsage(18, 0, 16, 0),
        PromptUsage(18, 16, 0, 16),
        PromptUsage(18, 16, 0, 0, num_own_tokens=16),
    ]


def test_preemption_changes_nothing_of_it_even_if_the_others_blocks_are_evicted() -> None:
    crowd = FakeModel(scheduler(num_blocks=11, max_batched_tokens=8))
    shared = list(range(100, 108))
    crowd.scheduler.add(engine_request(shared, serial=1, user=BOB, max_tokens=1))
    crowd.run()
    crowd.scheduler.add(engine_request(range(200, 214), serial=2, max_tokens=22))
    crowd.step()
    crowd.step()
    crowd.scheduler.add(engine_request([*shared, *range(300, 315)], serial=3, user=ANN, max_tokens=1))
    starts = []
    while crowd.scheduler.has_work():
        crowd.step()
        starts += [chunk.start for chunk in crowd.chunks if chunk.request.key.number == 3]
    assert starts == [8, 15, 4, 12, 20]  # only one of the two blocks is left when it starts again
    assert usages(crowd, 3) == [PromptUsage(23, 8, 12, 8)]
