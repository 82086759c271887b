"""Fixture that changes what clients answer."""

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Message

from fedsim.engine import engines as engine

Answer = Callable[[Message, Any], Message]


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Answer, Message, Any, int], Message]], None]:
    """A function that puts a function between server and clients; it is called with the app, message, context and round."""

    def put(between: Callable[[Answer, Message, Any, int], Message]) -> None:
        real = engine.make_client_app

        def wrapped(run_of: Any) -> Any:
            app = real(run_of)
            return lambda message, context: between(app, message, context, int(message.content["config"]["server-round"]))

        monkeypatch.setattr(engine, "make_client_app", wrapped)

    return put
