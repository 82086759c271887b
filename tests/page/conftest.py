"""Fixtures of tests of the web page: a run, a service on it, and a browser that records errors of the page."""

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
    """Browser: the system's Chromium, or else the one that `playwright install chromium` downloaded."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS)
    except Error as error:
        pytest.skip(f"no browser: {error.message.splitlines()[0]}; install chromium, or run playwright install chromium")
    yield launched
    launched.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opening]:
    """Function that opens a URL of a service; after the test, pages with errors or requests to other hosts fail it."""
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
    assert [one.other_hosts for one in watched if one.other_hosts] == []


@pytest.fixture
def fake() -> Iterator[Fake]:
    with served(Fake()) as serving:
        yield serving


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds a run of three clients and two rounds, attacked and scored."""
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
    """Folder of runs with a copy of the recorded one, for one test."""
    return root_in(tmp_path, recorded)


@pytest.fixture(scope="session")
def shared(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs of the fixture `service`, shared by tests."""
    return root_in(tmp_path_factory.mktemp("shared"), recorded)


@pytest.fixture(scope="session")
def service(shared: Path) -> Iterator[str]:
    """Address of a service with true examples and one worker, for tests that do not disturb each other."""
    with serving(shared, "--truth", "own", "--workers", "1") as address:
        yield address


@pytest.fixture(scope="session")
def locked(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a service that requires a token, and that has no true examples."""
    root = root_in(tmp_path_factory.mktemp("locked"), recorded)
    with serving(root, "--workers", "0", "--token") as address:
        (token,) = [file.read_text().strip() for file in (root / ".attacker").glob("*token*")]
        yield address, token
