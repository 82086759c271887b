"""A real run, a real service on it, and a browser that tells of everything the page does wrong."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake import Fake, served
from page_service import EXPERIMENT, command, serving
from page_watched import BROWSERS, FLAGS, PATIENCE, Opening, Watched
from playwright.sync_api import Browser, Error, Page, Playwright, expect, sync_playwright

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """The system's Chromium, or else the one that `playwright install chromium` fetched."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS)
    except Error as error:
        pytest.skip(f"no browser: {error.message.splitlines()[0]}; install chromium, or run playwright install chromium")
    yield launched
    launched.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opening]:
    """Opens an address of a service; at the end the page must have made no error and asked no other host."""
    watched: list[Watched] = []

    def open_page(base: str, place: str = "", *, expected: tuple[str, ...] = (), width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 860}, **options)
        context.set_default_timeout(PATIENCE)
        one = Watched(context.new_page(), base, expected=expected)
        one.page.on("console", one.console)
        one.page.on("pageerror", lambda error: one.errors.append(str(error)))
        one.page.on("request", one.request)
        watched.append(one)
        one.page.goto(base + place, wait_until="domcontentloaded")
        return one.page

    yield open_page
    for one in watched:
        one.page.context.close()
    assert [one.errors for one in watched if one.errors] == []
    assert [one.strangers for one in watched if one.strangers] == []


@pytest.fixture
def fake() -> Iterator[Fake]:
    with served(Fake()) as serving:
        yield serving


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three clients and two rounds, attacked and scored."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "photos.toml").write_text(EXPERIMENT)
    command("fedsim", "run", folder / "photos.toml", "--out", folder / "photos", "--engine", "local")
    command("attacker", "replay", folder / "photos" / "recording", "--attack", "exact")
    command("attacker", "score", folder / "photos")
    return folder


def root_in(folder: Path, recorded: Path) -> Path:
    shutil.copytree(recorded / "photos", folder / "runs" / "photos")
    return folder / "runs"


@pytest.fixture
def root(recorded: Path, tmp_path: Path) -> Path:
    """A folder of runs with a copy of the recorded one."""
    return root_in(tmp_path, recorded)


@pytest.fixture(scope="session")
def shared(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of `service`."""
    return root_in(tmp_path_factory.mktemp("shared"), recorded)


@pytest.fixture(scope="session")
def service(shared: Path) -> Iterator[str]:
    """The address of a service with truth and one worker, for tests that leave each other alone."""
    with serving(shared, "--truth", "own", "--workers", "1") as address:
        yield address


@pytest.fixture(scope="session")
def locked(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address and the token of a service that asks for it, and was given no truth."""
    root = root_in(tmp_path_factory.mktemp("locked"), recorded)
    with serving(root, "--workers", "0", "--token") as address:
        (token,) = [file.read_text().strip() for file in (root / ".attacker").glob("*token*")]
        yield address, token
