import asyncio

from cluster.controller.bulletin import NUM_NOTES_KEPT, Bulletin


async def test_who_follows_reads_every_note_once_and_waits_for_the_next() -> None:
    bulletin = Bulletin()
    await bulletin.note("one")
    await bulletin.note("two")
    assert await bulletin.newer_than(-1) == ("one", "two")
    assert await bulletin.newer_than(1) == ("two",)
    waiting = asyncio.create_task(bulletin.newer_than(bulletin.version))
    await asyncio.sleep(0)
    assert not waiting.done()
    await bulletin.note("three")
    assert await waiting == ("three",)


async def test_old_notes_are_forgotten() -> None:
    bulletin = Bulletin()
    for number in range(NUM_NOTES_KEPT + 1):
        await bulletin.note(str(number))
    assert (await bulletin.newer_than(-1))[0] == "1"


async def test_what_is_waited_for_is_looked_at_after_every_note() -> None:
    bulletin = Bulletin()
    waiting = asyncio.create_task(bulletin.until(lambda: bulletin.version == 2))
    await bulletin.note("one")
    await asyncio.sleep(0)
    assert not waiting.done()
    await bulletin.note("two")
    await waiting


def test_a_complaint_stands_until_it_is_withdrawn_and_is_news_once() -> None:
    bulletin = Bulletin()
    assert bulletin.news("metrics", None) is None
    assert bulletin.news("metrics", "the port is taken") == "the port is taken"
    assert bulletin.news("metrics", "the port is taken") is None
    assert bulletin.complaints == {"metrics": "the port is taken"}
    assert bulletin.news("metrics", None) == "metrics: all is well again"
    assert bulletin.complaints == {}
