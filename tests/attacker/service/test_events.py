"""The feed: everyone is told everything in order, who was away goes on where it left, and who is too slow is let go."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest

from attacker.service.events import KEEP_ALIVE_COMMENT, MAX_WAITING_EVENTS, Event, Feed, TooMany, encode_event


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(check(), 30))  # type: ignore[arg-type]


async def take(told: AsyncGenerator[Event | None, None], count: int) -> list[tuple[str, str]]:
    found = [await anext(told) for _ in range(count)]
    return [(event.kind, event.key) for event in found if event is not None]


def test_all_listeners_are_told_in_order_from_whatever_thread() -> None:
    async def check() -> None:
        feed = Feed()
        async with aclosing(feed.listen()) as one, aclosing(feed.listen()) as other:
            assert await take(one, 1) == await take(other, 1) == [("hello", "")]
            thread = threading.Thread(target=lambda: [feed.publish("job", str(n), n) for n in range(100)])
            thread.start()
            expected = [("job", str(n)) for n in range(100)]
            assert await take(one, 100) == await take(other, 100) == expected
            thread.join()

    run(check)


def test_who_was_away_is_told_what_it_missed_and_nothing_twice() -> None:
    async def check() -> None:
        feed = Feed()
        async with aclosing(feed.listen()) as told:
            await anext(told)
            feed.publish("job", "a", 1)
            last = await anext(told)
            assert last is not None
        feed.publish("job", "b", 2)
        feed.publish("job", "c", 3)
        async with aclosing(feed.listen(feed.make_id(last))) as told:
            hello = await anext(told)
            assert hello is not None
            assert hello.data == '{"resumed": true}'
            feed.publish("job", "d", 4)
            assert await take(told, 3) == [("job", "b"), ("job", "c"), ("job", "d")]

    run(check)


@pytest.mark.parametrize("last", [None, "", "x", "other-1", "{run}-99", "{run}--1", "{run}-x", "{run}-0"])
def test_who_was_away_too_long_is_told_so(last: str | None) -> None:
    async def check() -> None:
        feed = Feed(kept=3)
        for number in range(10):
            feed.publish("job", str(number), number)
        async with aclosing(feed.listen(last and last.format(run=feed.run))) as told:
            hello = await anext(told)
            assert hello is not None
            assert hello.data == '{"resumed": false}'
            feed.publish("job", "new", 0)
            assert await take(told, 1) == [("job", "new")]

    run(check)


def test_a_listener_that_is_too_slow_is_let_go_and_the_others_stay() -> None:
    async def check() -> None:
        feed = Feed()
        async with aclosing(feed.listen()) as slow, aclosing(feed.listen()) as quick:
            await anext(slow)
            await anext(quick)
            for number in range(MAX_WAITING_EVENTS + 10):
                feed.publish("job", str(number), number)
                await anext(quick)
            assert [event async for event in slow] == []
            feed.publish("job", "more", 0)
            assert await take(quick, 1) == [("job", "more")]
            assert len(feed) == 1

    run(check)


def test_listeners_are_so_many_and_no_more_and_gone_when_they_are() -> None:
    async def check() -> None:
        feed = Feed(listeners=2)
        async with aclosing(feed.listen()) as one, aclosing(feed.listen()) as two:
            await take(one, 1)
            await take(two, 1)
            with pytest.raises(TooMany):
                await anext(feed.listen())
        assert len(feed) == 0

    run(check)


def test_the_end_of_the_feed_is_the_end_of_its_listeners() -> None:
    async def check() -> None:
        feed = Feed()
        async with aclosing(feed.listen()) as told:
            await anext(told)
            feed.close()
            assert [event async for event in told] == []
        with pytest.raises(TooMany):
            await anext(feed.listen())

    run(check)


def test_silence_is_told_too() -> None:
    async def check() -> None:
        async with aclosing(Feed().listen(beat=0.01)) as told:
            await anext(told)
            assert await anext(told) is None

    run(check)
    assert encode_event(None) == KEEP_ALIVE_COMMENT


def test_what_is_told_stays_in_its_line() -> None:
    async def check() -> None:
        feed = Feed()
        async with aclosing(feed.listen()) as told:
            await anext(told)
            feed.publish("job", "a", {"words": "one\ntwo\r\ndata: three\u2028"})
            event = await anext(told)
            assert event is not None
            lines = encode_event(event, feed.make_id(event)).decode().split("\n")
            assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", "", ""]

    run(check)
