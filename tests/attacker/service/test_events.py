"""Tests of the feed of events: all listeners get all events in order, may resume, and are disconnected if too slow."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from typing import Any

import pytest

from attacker.service.events import KEEP_ALIVE_COMMENT, MAX_WAITING_EVENTS, Event, Feed, TooManyListeners, encode_event


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return the test as a function that runs it in an event loop, for at most 30 seconds."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 30))

    return run


async def take(events: AsyncGenerator[Event | None, None], count: int) -> list[tuple[str, str]]:
    found = [await anext(events) for _ in range(count)]
    return [(event.kind, event.key) for event in found if event is not None]


@in_loop
async def test_all_listeners_get_events_in_order_from_any_thread() -> None:
    feed = Feed()
    async with aclosing(feed.listen()) as one, aclosing(feed.listen()) as other:
        assert await take(one, 1) == await take(other, 1) == [("hello", "")]
        thread = threading.Thread(target=lambda: [feed.publish("job", str(n), n) for n in range(100)])
        thread.start()
        expected = [("job", str(n)) for n in range(100)]
        assert await take(one, 100) == await take(other, 100) == expected
        thread.join()


@in_loop
async def test_reconnected_listener_gets_missed_events_once() -> None:
    feed = Feed()
    async with aclosing(feed.listen()) as events:
        await anext(events)
        feed.publish("job", "a", 1)
        last = await anext(events)
        assert last is not None
    feed.publish("job", "b", 2)
    feed.publish("job", "c", 3)
    async with aclosing(feed.listen(feed.make_id(last))) as events:
        hello = await anext(events)
        assert hello.data == '{"resumed": true}'
        feed.publish("job", "d", 4)
        assert await take(events, 3) == [("job", "b"), ("job", "c"), ("job", "d")]


@pytest.mark.parametrize("last", [None, "", "x", "other-1", "{run}-99", "{run}--1", "{run}-x", "{run}-0"])
@in_loop
async def test_listener_with_an_unknown_last_event_is_told_to_reload(last: str | None) -> None:
    feed = Feed(kept=3)
    for number in range(10):
        feed.publish("job", str(number), number)
    async with aclosing(feed.listen(last and last.format(run=feed.run))) as events:
        hello = await anext(events)
        assert hello.data == '{"resumed": false}'
        feed.publish("job", "new", 0)
        assert await take(events, 1) == [("job", "new")]


@in_loop
async def test_too_slow_listener_is_disconnected() -> None:
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


@in_loop
async def test_number_of_listeners_is_limited() -> None:
    feed = Feed(listeners=2)
    async with aclosing(feed.listen()) as one, aclosing(feed.listen()) as two:
        await take(one, 1)
        await take(two, 1)
        with pytest.raises(TooManyListeners):
            await anext(feed.listen())
    assert len(feed) == 0


@in_loop
async def test_closing_the_feed_ends_its_listeners() -> None:
    feed = Feed()
    async with aclosing(feed.listen()) as events:
        await anext(events)
        feed.close()
        assert [event async for event in events] == []
    with pytest.raises(TooManyListeners):
        await anext(feed.listen())


@in_loop
async def test_silence_gives_keep_alive_comments() -> None:
    async with aclosing(Feed().listen(beat=0.01)) as events:
        await anext(events)
        assert await anext(events) is None
    assert encode_event(None) == KEEP_ALIVE_COMMENT


@in_loop
async def test_line_breaks_in_data_are_escaped() -> None:
    feed = Feed()
    async with aclosing(feed.listen()) as events:
        await anext(events)
        feed.publish("job", "a", {"words": "one\ntwo\r\ndata: three\u2028"})
        event = await anext(events)
        assert event is not None
        lines = encode_event(event, feed.make_id(event)).decode().split("\n")
        assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", "", ""]
