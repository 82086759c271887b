"""Browser settings, and a record of what a page does wrong during a test."""

from collections.abc import Callable
from dataclasses import dataclass, field

from playwright.sync_api import ConsoleMessage, Page, Request

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 30_000
"""Milliseconds within which a page must show something, generous for busy machines."""
Opening = Callable[..., Page]


@dataclass
class Watched:
    """A page with its errors and its requests to other hosts; console messages that contain an `expected` text are ignored."""

    page: Page
    allowed: str
    errors: list[str] = field(default_factory=list)
    other_hosts: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(words in message.text for words in self.expected):
            self.errors.append(message.text)

    def request(self, request: Request) -> None:
        if not request.url.startswith((self.allowed, "data:", "blob:", "about:")):
            self.other_hosts.append(request.url)
