"""Tests of the web page while it loads, without any run, and on a phone."""

import threading
from typing import Any

import pytest
from fake import Fake, listed, recording
from made_up import filled
from page_watched import Opening
from playwright.sync_api import expect

pytestmark = pytest.mark.page

EXPLAINED = "The null of an attack is the same attack without the update: it can only guess."
CUT = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"


def test_loading_page_shows_a_skeleton_without_a_defense(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    answered = threading.Event()

    def late(query: dict[str, str]) -> Any:
        answered.wait(20)
        return listed([recording("big", defense="clip(1)")])

    fake.answers["recordings"] = late
    page = opened(fake.address, "#/run/big")
    head = page.locator("header.head")
    expect(head.locator(".skeleton")).to_be_visible()
    expect(head).not_to_contain_text("no defense")
    answered.set()
    expect(head).to_contain_text("clip(1)")
    expect(page.locator(".skeleton").locator("visible=true")).to_have_count(0)


def test_page_without_runs_names_the_watched_folder(fake: Fake, opened: Opening) -> None:
    fake.answers["recordings"] = {**listed([]), "trouble": [], "root": "/srv/my runs"}
    for width in (1280, 390):
        page = opened(fake.address, width=width)
        expect(page.locator("main")).to_contain_text("No run yet. This service watches /srv/my runs.")
        command = page.locator("main pre")
        expect(command).to_have_text("fedsim run EXPERIMENT.toml --out '/srv/my runs'/NAME")
        assert command.evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_headline_states_coverage_and_failures_and_explains_the_null(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    page = opened(fake.address, "#/run/big")
    first = page.locator(".headline")
    expect(first).to_contain_text(
        "1 attack on 4 of 5 updates: 4 of 4 cases finished, 1 failed; 1 requested update failed or was late."
    )
    expect(first).to_contain_text("Mean PSNR of all: 20.0 dB, its null 8.0 dB.")
    expect(first.locator("figcaption")).to_contain_text("null: label cow ✗, 8.0 dB")
    for place in ("#/", "#/run/big", "#/run/big/case/cpl-1/1"):
        page.goto("about:blank")
        page.goto(fake.address + place)
        expect(page.locator("main")).to_contain_text(EXPLAINED)
        text = page.locator("main").inner_text()
        assert "null" not in text.partition(EXPLAINED)[0]


def test_tables_are_cards_on_a_phone(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna", "ben"], rounds=4)
    for width, table in ((1280, "table-row"), (390, "grid")):
        page = opened(fake.address, "#/run/big", width=width)
        row = page.get_by_role("region", name="Cases").locator("tbody tr").first
        expect(row).to_contain_text("null 8.0 dB")
        expect(row).to_have_css("display", table)
        assert page.evaluate(CUT) == 0
