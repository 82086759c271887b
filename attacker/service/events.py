"""Feed of server-sent events about changes.

A page that reconnects with the id of its last event receives the events that it missed, if all of them are still stored.
"""

import asyncio
import json
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_KEPT_EVENTS = 2000
"""Largest number of past events that are kept for pages that reconnect."""
MAX_WAITING_EVENTS = 500
"""Largest number of events that wait for one listener. A listener that is slower is disconnected, and connects again."""
MAX_LISTENERS = 200
HEARTBEAT_SECONDS = 15.0
KEEP_ALIVE_COMMENT = b": still here\n\n"


class TooManyListeners(RuntimeError):
    """Raised for a new listener if the maximum number of listeners is reached or the feed is closed."""


class Event(NamedTuple):
    """One change.

    number: number of the event in its feed, from 1; 0 for an event that was made for a single connection. A `hello`, the first
    event of a connection to the feed, has the number of the last event that is not sent on this connection: later events follow.
    kind: what changed, such as "job". key: its subject, such as the job's id; "" for a `hello`. data: content as JSON text.
    """

    number: int
    kind: str
    key: str
    data: str


@dataclass(eq=False)
class _Listener:
    loop: asyncio.AbstractEventLoop
    waiting: asyncio.Queue[Event | None] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_EVENTS))
    gone: bool = False

    def take(self, event: Event | None) -> None:
        """Put an event into the listener's queue; None disconnects it once it has received its waiting events.

        A listener whose queue is full is disconnected at once, and its waiting events are dropped. Must be called in the event
        loop of the listener.
        """
        if self.gone:
            return
        try:
            self.waiting.put_nowait(event)
        except asyncio.QueueFull:
            self.gone = True
            while not self.waiting.empty():
                self.waiting.get_nowait()
            self.waiting.put_nowait(None)


class Feed:
    """Changes, distributed to all listeners. `publish` and `close` may be called from any thread.

    kept: number of past events that are stored for listeners that reconnect. listeners: maximum number of listeners.
    """

    def __init__(self, kept: int = MAX_KEPT_EVENTS, listeners: int = MAX_LISTENERS) -> None:
        self.run = secrets.token_hex(4)
        self._events: deque[Event] = deque(maxlen=kept)
        self._listeners: set[_Listener] = set()
        self._max_listeners, self._number, self._closed = listeners, 0, False
        self._lock = threading.Lock()

    def publish(self, kind: str, key: str, data: Any) -> None:
        """Send an event to all listeners, and store it for those that reconnect.

        kind, key: as in `Event`. data: content of the event, which is sent as JSON.
        """
        with self._lock:
            self._number += 1
            event = Event(self._number, kind, key, json.dumps(data, allow_nan=False, separators=(",", ":")))
            self._events.append(event)
            self._tell(event)

    def close(self) -> None:
        """Disconnect all listeners, and refuse new ones."""
        with self._lock:
            self._closed = True
            self._tell(None)

    def __len__(self) -> int:
        """Return the number of listeners."""
        return len(self._listeners)

    async def listen(
        self, last: str | None = None, wanted: Callable[[Event], bool] | None = None, beat: float = HEARTBEAT_SECONDS
    ) -> AsyncGenerator[Event | None, None]:
        """Yield events as they are published, and None after `beat` seconds without one.

        The first event is a `hello`, whose field `resumed` tells whether missed events follow: all events after the one with id
        `last`, or none if some of them are no longer stored or `last` is unknown.

        last:   id of the last event that the listener received on an earlier connection, if any; see `make_id`.
        wanted: selects events; None takes all of them.

        Stops when the feed is closed, and when more than `MAX_WAITING_EVENTS` events wait for the listener. Raises
        TooManyListeners when the first event is requested, if the maximum number of listeners is reached or the feed is closed.
        """
        listener = _Listener(asyncio.get_running_loop())
        with self._lock:
            if self._closed or len(self._listeners) >= self._max_listeners:
                raise TooManyListeners(
                    f"no further page can receive events: {len(self._listeners)} of at most {self._max_listeners} do"
                    f"{', and the service is stopping' if self._closed else ''}; close some pages, or try again later"
                )
            missed = self._list_missed(last)
            now = self._number
            self._listeners.add(listener)
        try:
            yield Event(now if missed is None else _parse_number(last), "hello", "", json.dumps({"resumed": missed is not None}))
            for event in missed or ():
                if wanted is None or wanted(event):
                    yield event
            while True:
                try:
                    async with asyncio.timeout(beat):
                        event_or_end = await listener.waiting.get()
                except TimeoutError:
                    yield None
                    continue
                if event_or_end is None:
                    return
                if wanted is None or wanted(event_or_end):
                    yield event_or_end
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def make_id(self, event: Event) -> str:
        """Return an event's id: its number, and a name of this feed that differs after a restart of the service."""
        return f"{self.run}-{event.number}"

    def _list_missed(self, last: str | None) -> list[Event] | None:
        """Return the events after the one with id `last`.

        None if `last` is None or not an id of this feed, or if some of the events after it are no longer stored.
        """
        if last is None or last.partition("-")[0] != self.run:
            return None
        number = _parse_number(last)
        if not 0 <= number <= self._number or (
            number < self._number and (not self._events or self._events[0].number > number + 1)
        ):
            return None
        return [event for event in self._events if event.number > number]

    def _tell(self, event: Event | None) -> None:
        for listener in list(self._listeners):
            try:
                listener.loop.call_soon_threadsafe(listener.take, event)
            except RuntimeError:  # its loop is closed
                self._listeners.discard(listener)


def _parse_number(last: str | None) -> int:
    text = (last or "").partition("-")[2]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1


def encode_event(event: Event | None, id: str = "") -> bytes:
    """Return a server-sent event, with an id unless it is "", as bytes; None gives a comment that keeps the connection."""
    if event is None:
        return KEEP_ALIVE_COMMENT
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {event.kind}\ndata: {event.data}\n\n".encode()
