"""Tests of the web page when data arrive while the user acts, and when responses arrive late."""

import threading
from typing import Any

import pytest
from fake import Fake, job, listed, recording
from page_watched import Opening
from playwright.sync_api import expect
from processes import wait_until

pytestmark = pytest.mark.page

SECONDS = 20


def test_click_during_a_change_of_state_is_not_lost(fake: Fake, opened: Opening) -> None:
    fake.answers["recordings"] = listed([recording("big")])
    fake.answers["jobs"] = listed([job("1", version=1)])
    fake.answers["POST jobs/1/cancel"] = job("1", version=3, state="cancelled")
    page = opened(fake.address, "#/job/1", expected=("404",))
    page.get_by_role("button", name="Cancel").hover()
    expect(page.locator("#link")).to_have_text("live")
    page.mouse.down()
    fake.tell("job", job("1", version=2, state="running"))
    expect(page.locator("main .mark").first).to_have_text("running")
    page.mouse.up()
    expect(page.locator("main .mark").first).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Retry")).to_be_enabled()


def test_dialog_opened_while_the_page_loads_lists_the_runs(fake: Fake, opened: Opening) -> None:
    requests: list[int] = []
    connected, first, last = threading.Event(), threading.Event(), threading.Event()

    def late(query: dict[str, str]) -> Any:
        requests.append(len(requests))
        (first if len(requests) == 1 else last).wait(SECONDS)
        return listed([recording("big")])

    fake.answers["recordings"] = late
    fake.answers["attacks"] = listed([{"name": "cpl", "summary": "", "arguments": {}, "needs": []}])
    fake.before_stream = lambda: connected.wait(SECONDS)
    page = opened(fake.address, expected=("404",))
    page.get_by_role("button", name="New attack").press("Enter")
    wait_until(lambda: len(requests) == 1)
    connected.set()
    wait_until(lambda: len(requests) == 2)
    with page.expect_response("**/recordings"):
        first.set()
    last.set()
    dialog = page.get_by_role("dialog", name="New attack")
    expect(dialog.get_by_label("Run", exact=True)).to_be_focused()
    expect(dialog.get_by_label("Run", exact=True)).to_have_value("big")


def test_dialog_shows_why_the_runs_cannot_be_read(fake: Fake, opened: Opening) -> None:
    fake.refusals["recordings"] = (500, {"error": {"message": "The disk is full.", "field": None, "known": None}})
    fake.answers["attacks"] = listed([])
    page = opened(fake.address, expected=("500",))
    page.get_by_role("button", name="New attack").click()
    expect(page.get_by_role("dialog", name="New attack").get_by_role("alert")).to_have_text("The disk is full.")
