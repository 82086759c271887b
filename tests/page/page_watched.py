"""A page, and all that it does wrong while a test looks at it."""

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
"""Milliseconds until a page must show something: what is slow is the machine, which many tests share."""
Opening = Callable[..., Page]


@dataclass
class Watched:
    """A page and what it did wrong: errors, refusals of the policy, requests to other hosts."""

    page: Page
    allowed: str
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(words in message.text for words in self.expected):
            self.errors.append(message.text)

    def request(self, request: Request) -> None:
        if not request.url.startswith((self.allowed, "data:", "blob:", "about:")):
            self.strangers.append(request.url)
