"""Tests of the web page with a real service and run, from the list of recordings to reconstructions."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from page_service import COMMANDS, EXPERIMENT, asked, environment, free_port, serving
from page_watched import Opening
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.page

RUN = "#/run/photos"
JOB_MILLISECONDS = 180_000
"""Milliseconds that a job may take, including the start of its worker."""


def first_case(service: str) -> dict[str, str]:
    cases = asked(service, "recordings/photos/cases?limit=200")["items"]
    found: dict[str, str] = next(one for one in cases if one["status"] == "done" and "null" not in one["attack"])
    return found


def test_run_is_listed_with_its_strongest_attack(service: str, opened: Opening) -> None:
    page = opened(service)
    card = page.get_by_role("article").filter(has_text="photos")
    expect(card).to_contain_text("3 clients")
    expect(card).to_contain_text("100 % of 6 examples recovered by Exact, its null 0 %")
    card.get_by_role("link", name="photos").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("photos")
    assert page.url.endswith(RUN)


def test_cell_shows_original_reconstruction_and_null(service: str, opened: Opening) -> None:
    client = asked(service, "recordings/photos/grid")["clients"][1]
    page = opened(service, f"{RUN}?cell=2@{client}")
    chosen = page.get_by_role("complementary", name="The chosen cell")
    expect(chosen.get_by_role("heading", name="Round 2")).to_be_visible()
    expect(chosen.get_by_role("img", name=re.compile("^Private original"))).to_have_count(1)
    expect(chosen.get_by_role("img", name=re.compile("^Reconstruction"))).to_have_count(1)
    expect(chosen.get_by_role("img", name=re.compile("^The null"))).to_have_count(1)
    expect(chosen).to_contain_text("✓ recovered")
    expect(chosen).to_contain_text(re.compile("null: label .*dB"))
    for image in chosen.get_by_role("img").all():
        image.scroll_into_view_if_needed()
        expect(image).to_have_js_property("naturalWidth", 32)


def test_verdict_and_nearest_pairs_precede_the_grid(service: str, opened: Opening) -> None:
    page = opened(service, RUN)
    first = page.locator("section.headline")
    expect(first).to_contain_text(re.compile("Exact recovered 6 of 6 private images .*without the gradient it recovers 0 of 6"))
    expect(first).to_contain_text("1 attack on 6 of 6 updates: 6 of 6 cases finished, none failed.")
    pairs = first.locator("figure.pair")
    expect(pairs).to_have_count(6)
    for kind in ("Private original", "Reconstruction", "The null"):
        expect(first.get_by_role("img", name=re.compile(f"^{kind}"))).to_have_count(6)
    headline = asked(service, "recordings/photos/headline")
    nearest = [one["example"]["psnr"] for one in headline["worst"]]
    assert nearest == sorted(nearest, reverse=True)
    assert headline["null_psnr"] < headline["psnr"]
    assert page.evaluate("document.querySelector('.headline').compareDocumentPosition(document.querySelector('[role=grid]')) & 4")


def test_case_has_its_own_url(service: str, opened: Opening) -> None:
    case = first_case(service)
    page = opened(service, f"#/run/photos/case/{case['attack']}/{case['case']}")
    expect(page.get_by_role("heading", level=1)).to_have_text("Exact")
    expect(page.get_by_role("img", name=re.compile("^The null"))).to_be_visible()
    expect(page.locator("dl.facts")).to_contain_text("layers")


def test_leakage_chart_includes_the_null_and_is_read_by_keys(service: str, opened: Opening) -> None:
    page = opened(service, RUN)
    chart = page.locator("figure").filter(has_text="Leakage over rounds")
    expect(chart).to_contain_text("Exact, the null")
    picture = chart.get_by_role("img", name=re.compile("^Leakage over rounds"))
    for _ in range(10):  # the chart is drawn anew, without focus, if data arrive in the meantime
        picture.press("End")
        if chart.locator(".tip").is_visible():
            break
    expect(chart.locator(".tip")).to_contain_text("round 2")
    expect(chart.locator(".tip")).to_contain_text("Exact: 100 %")
    expect(chart.locator(".tip")).to_contain_text("Exact, the null: 0 %")


def test_filters_select_cases_and_are_kept_in_the_url(service: str, opened: Opening) -> None:
    page = opened(service, RUN)
    cases = page.get_by_role("region", name="Cases").locator("tbody tr")
    expect(cases).to_have_count(6)
    page.get_by_label("From round").fill("2")
    page.get_by_label("From round").press("Enter")
    expect(cases).to_have_count(3)
    page.get_by_label("Success").select_option("some recovered")
    expect(cases).to_have_count(3)
    assert "from=2" in page.url
    assert "success=some" in page.url
    page.reload()
    expect(cases).to_have_count(3)
    page.get_by_role("button", name="Clear").click()
    expect(cases).to_have_count(6)
    page.get_by_label("Attack", exact=True).select_option(label="Exact, the null")
    expect(cases).to_have_count(6)
    expect(cases.first).to_contain_text("the null")


def test_page_of_an_absent_run_says_so_once(service: str, opened: Opening) -> None:
    page = opened(service, "#/run/gone", expected=("404",))
    expect(page.locator("main")).to_contain_text("This run is not on the list of runs.")
    expect(page.get_by_text("there is no recording").locator("visible=true")).to_have_count(0)
    expect(page.get_by_role("button", name="Attack it")).to_be_hidden()
    page.goto(service + RUN)
    expect(page.get_by_role("button", name="Attack it")).to_be_visible()


def test_wrong_value_is_reported_at_its_field(service: str, opened: Opening) -> None:
    page = opened(service, RUN, expected=("422", "400"))
    page.get_by_role("button", name="Attack it").click()
    dialog = page.get_by_role("dialog", name="New attack")
    expect(dialog.get_by_label("Run", exact=True)).to_have_value("photos")
    expect(dialog.get_by_label("Attack", exact=True)).to_have_value("cpl")
    dialog.get_by_label("Rounds").fill("last")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.get_by_label("Rounds")).to_have_attribute("aria-invalid", "true")
    expect(dialog.get_by_label("Rounds")).to_be_focused()
    dialog.get_by_label("Rounds").fill("1")
    dialog.get_by_label("Attack", exact=True).select_option("cpl")
    dialog.get_by_text("Arguments of the attack").click()
    dialog.get_by_label("steps", exact=True).fill("-3")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.locator("[data-field^=arguments]").filter(has=page.locator("[aria-invalid]"))).to_contain_text("steps")


def test_submitted_job_ends_and_its_images_appear(service: str, opened: Opening) -> None:
    page = opened(service, expected=("404",))  # a preview that is asked for when the job has just ended
    page.get_by_role("button", name="New attack").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Attack", exact=True).select_option("cpl")
    dialog.get_by_label("Rounds").fill("1")
    dialog.get_by_text("Arguments of the attack").click()
    dialog.get_by_label("steps", exact=True).fill("30")
    dialog.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("CPL on photos")
    expect(page.locator("main .mark").first).to_have_text("done", timeout=JOB_MILLISECONDS)
    expect(page.get_by_role("img", name=re.compile("^Reconstruction")).first).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Private original")).first).to_be_visible()
    page.goto(f"{service}#/jobs")
    expect(page.get_by_role("listitem").filter(has_text="CPL on photos").first).to_contain_text("done")


def test_started_audit_ends_with_its_verdict(service: str, opened: Opening) -> None:
    page = opened(service, RUN, expected=("404",))  # a preview that is asked for when the job has just ended
    page.get_by_role("button", name="Audit it").click()
    dialog = page.get_by_role("dialog", name="Audit")
    dialog.get_by_label("Budget").select_option("1 minute")
    dialog.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Audit on photos")
    expect(page.locator("dl.facts")).to_contain_text("Budget of its attacks")
    expect(page.get_by_role("heading", name="Verdict: severe")).to_be_visible(timeout=JOB_MILLISECONDS)
    expect(page.locator("main")).to_contain_text("severe: Private examples can be reconstructed from one update of one client.")
    expect(page.locator("main code", has_text="attacker audit --what-if").first).to_be_visible()
    with page.context.expect_page() as whole:
        page.get_by_role("link", name="The whole verdict").click()
    expect(whole.value.get_by_role("heading", level=1)).to_have_text("Verdict: severe")
    page.goto(f"{service}{RUN}")
    page.get_by_role("link", name="Last audit").click()
    expect(page.get_by_role("heading", name="Verdict: severe")).to_be_visible()


def test_running_attack_shows_images_and_can_be_cancelled_and_retried(service: str, opened: Opening) -> None:
    page = opened(service, RUN, expected=("404",))  # a preview that is asked for when the job has just ended
    page.get_by_role("button", name="Attack it").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Attack", exact=True).select_option("inverting_gradients")
    dialog.get_by_text("Arguments of the attack").click()
    dialog.get_by_label("steps", exact=True).fill("40000")
    dialog.get_by_role("button", name="Start").click()
    emerging = page.get_by_role("img", name=re.compile("^Intermediate image"))
    expect(emerging.first).to_be_visible(timeout=JOB_MILLISECONDS)
    before = emerging.first.get_attribute("src")
    expect(emerging.first).not_to_have_attribute("src", str(before), timeout=JOB_MILLISECONDS)
    page.get_by_role("button", name=re.compile("^Cancel")).click()
    expect(page.locator("main .mark").first).to_have_text("cancelled", timeout=JOB_MILLISECONDS)
    expect(page.get_by_text("it was stopped before it was scored")).to_have_count(1)
    expect(emerging).to_have_count(0)
    page.get_by_role("button", name=re.compile("^Retry")).click()
    expect(page.locator("main .mark").first).to_have_text(re.compile("queued|running"))
    page.get_by_role("button", name=re.compile("^Cancel")).click()
    expect(page.locator("main .mark").first).to_have_text("cancelled", timeout=JOB_MILLISECONDS)


def test_new_federation_appears_on_the_open_page(service: str, shared: Path, opened: Opening) -> None:
    page = opened(service)
    expect(page.get_by_role("article").filter(has_text="photos")).to_be_visible()
    experiment = shared.parent / "live.toml"
    experiment.write_text(EXPERIMENT)
    with recording(experiment, shared / "live", rounds=6):
        page.get_by_role("article").get_by_role("link", name="live").click(timeout=JOB_MILLISECONDS)
        expect(page.get_by_role("grid")).to_have_attribute("aria-colcount", "6", timeout=JOB_MILLISECONDS)
        expect(page.locator("header.head")).to_contain_text("3 clients, 6 rounds")


@contextmanager
def recording(experiment: Path, out: Path, *, rounds: int) -> Iterator[None]:
    """Run a federation within the context."""
    arguments = ["run", str(experiment), "--out", str(out), "--engine", "local", "--set", f"rounds={rounds}"]
    process = subprocess.Popen(
        [COMMANDS / "fedsim", *arguments], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def test_page_reconnects_when_the_service_is_back(root: Path, opened: Opening) -> None:
    port = free_port()
    with serving(root, "--workers", "0", port=port) as address:
        page = opened(address, expected=("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_NETWORK", "ERR_EMPTY"))
        expect(page.locator("#link")).to_have_text("live")
    expect(page.get_by_role("alert")).to_contain_text("The connection to the service is lost.")
    expect(page.get_by_role("article")).to_have_count(1)
    shutil.copytree(root / "photos", root / "second")
    with serving(root, "--workers", "0", port=port):
        expect(page.locator("#link")).to_have_text("live")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.get_by_role("article")).to_have_count(2)


def test_token_is_requested_once_and_kept(locked: tuple[str, str], opened: Opening) -> None:
    address, token = locked
    page = opened(address, expected=("401", "403"))
    dialog = page.get_by_role("dialog", name="This service asks for its token")
    expect(dialog).to_have_count(1)
    dialog.get_by_label("Token", exact=True).fill("x" * 43)
    dialog.get_by_role("button", name="Open").click()
    expect(dialog).to_contain_text("not this service's token")
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    give(page, token)
    expect(page.get_by_role("article")).to_contain_text("photos")
    expect(page.locator("#link")).to_have_text("live")
    assert token not in page.evaluate("document.cookie + JSON.stringify(localStorage) + location.href")
    page.reload()
    expect(page.get_by_role("article")).to_contain_text("photos")
    expect(dialog).to_have_count(0)


def test_printed_link_opens_the_page_and_removes_the_token(locked: tuple[str, str], opened: Opening) -> None:
    address, token = locked
    page = opened(address, f"#token={token}")
    expect(page.get_by_role("article")).to_contain_text("photos")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert token not in page.evaluate("document.cookie + JSON.stringify(localStorage) + location.href")
    page.go_back()
    assert token not in page.url


def test_a_link_with_a_wrong_token_asks_for_the_right_one(locked: tuple[str, str], opened: Opening) -> None:
    address, token = locked
    page = opened(address, f"#token={'x' * 43}", expected=("401",))
    expect(page.get_by_role("dialog", name="This service asks for its token")).to_be_visible()
    give(page, token)
    expect(page.get_by_role("article")).to_contain_text("photos")


def test_logging_out_requires_the_token_again(locked: tuple[str, str], opened: Opening) -> None:
    address, token = locked
    page = opened(address, f"#token={token}", expected=("401",))
    expect(page.get_by_role("article")).to_contain_text("photos")
    kept = page.context.cookies()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("dialog", name="This service asks for its token")).to_be_visible()
    page.context.add_cookies(kept)
    page.reload()
    expect(page.get_by_role("dialog", name="This service asks for its token")).to_be_visible()


def test_without_a_token_there_is_no_log_out_button(service: str, opened: Opening) -> None:
    page = opened(service)
    expect(page.get_by_role("article").filter(has_text="photos")).to_be_visible()
    expect(page.get_by_role("button", name="Log out")).to_be_hidden()


def test_without_true_examples_no_original_or_score_is_shown(locked: tuple[str, str], opened: Opening) -> None:
    address, token = locked
    page = opened(address, RUN, expected=("401",))
    give(page, token)
    expect(page.get_by_role("region", name="Attacks")).to_contain_text("not scored")
    expect(page.get_by_label("Success")).to_be_visible()
    page.get_by_role("region", name="Cases").get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Exact")
    expect(page.get_by_role("img", name=re.compile("^Reconstruction"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Private original"))).to_have_count(0)
    assert "recovered" not in page.locator("main").inner_text()


def give(page: Page, token: str) -> None:
    page.get_by_label("Token", exact=True).fill(token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_keyboard_navigation_from_the_list_to_a_cell_and_back(service: str, opened: Opening) -> None:
    page = opened(service)
    expect(page.get_by_role("article").filter(has_text="photos")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator("#skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    tab_to(page, "a.cover[href$=photos]")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.get_by_role("grid")).to_be_visible()
    tab_to(page, "[role=grid]")
    assert focus_is_visible(page)
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    clients = asked(service, "recordings/photos/grid")["clients"]
    cell = page.get_by_role("gridcell")
    expect(cell).to_contain_text(f"round 2, {clients[1]}")
    expect(cell).to_contain_text("recovered 100 %")
    assert page.get_by_role("grid").get_attribute("aria-activedescendant") == cell.get_attribute("id")
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="The chosen cell")).to_be_focused()
    expect(page.get_by_role("heading", name="Round 2")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("grid")).to_be_focused()


def test_dialog_keeps_and_returns_the_focus(service: str, opened: Opening) -> None:
    page = opened(service)
    button = page.get_by_role("button", name="New attack")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="New attack")
    expect(dialog.get_by_label("Run", exact=True)).to_be_focused()
    for _ in range(25):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || document.querySelector('dialog').contains(document.activeElement)"
        )
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()


def tab_to(page: Page, selector: str, most: int = 30) -> None:
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} is not reached by the tab key")


def focus_is_visible(page: Page) -> bool:
    return bool(page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth) >= 2"))
