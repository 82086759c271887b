"""Tests of the web page with a fake service: hostile names, large grids, failures, small screens and accessibility."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake import JOBS_REFUSED, Fake, grid, job, listed, recording
from made_up import filled
from page_watched import Opening
from playwright.sync_api import Page, expect
from processes import wait_until

pytestmark = pytest.mark.page

HOSTILE = "<img src=x onerror=\"document.title='owned'\">\"'><script>document.title='owned'</script>{{7*7}}"
SCHEMES: list[Any] = ["light", "dark"]
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text()
NAMELESS = Path(__file__).with_name("names.js").read_text()


VIEWS = {
    "runs": "#/",
    "run": "#/run/big?cell=1@anna",
    "case": "#/run/big/case/cpl-1/1",
    "jobs": "#/jobs",
    "job": "#/job/1",
    "failed": "#/job/2",
    "nowhere": "#/nowhere",
}


def test_hostile_names_are_shown_as_text(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=[HOSTILE, "anna"], rounds=2)
    summary = recording("big", name=HOSTILE, model=HOSTILE, defense=HOSTILE, trouble=[HOSTILE])
    fake.answers["recordings"] = {**listed([summary]), "trouble": [HOSTILE]}
    fake.answers["jobs"] = listed([job("1", state="failed", error=HOSTILE, origin=HOSTILE)])
    fake.answers["recordings/big/cases/cpl-1/1"]["examples"][0] |= {
        "label": HOSTILE,
        "failure": HOSTILE,
        "image": f"javascript:{HOSTILE}",
    }
    page = opened(fake.address)
    expect(page.get_by_role("article").get_by_role("link")).to_have_text(HOSTILE)
    page.get_by_text("1 folder not shown").click()
    expect(page.get_by_role("group").get_by_role("listitem")).to_have_text(HOSTILE)
    for place in ("#/run/big", "#/run/big/case/cpl-1/1", "#/jobs"):
        page.goto(fake.address + place)
        expect(page.locator("main")).to_contain_text("<img src=x")
    page.goto(f"{fake.address}#/run/big")
    page.get_by_role("grid").focus()
    page.keyboard.press("Control+Home")
    expect(page.get_by_role("gridcell")).to_contain_text(HOSTILE)
    assert page.title() != "owned"
    assert page.locator("script:not([src]), img[src=x], [onerror], [style*=expression]").count() == 0


def test_images_of_other_hosts_are_not_requested(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    fake.answers["recordings/big/cases/cpl-1/1"]["examples"][0]["image"] = "http://192.0.2.1/spy.png"
    page = opened(fake.address, "#/run/big/case/cpl-1/1")
    expect(page.locator(".blank")).to_have_text("no reconstruction")


def test_grid_of_100_clients_and_500_rounds_is_fast(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=[f"{n:012x}" for n in range(100)], rounds=500)
    page = opened(fake.address, "#/run/big")
    frame = page.get_by_role("grid")
    expect(frame).to_have_attribute("aria-colcount", "500")
    frame.focus()
    page.keyboard.press("Control+End")
    expect(page.get_by_role("gridcell")).to_contain_text("round 500")
    milliseconds = page.evaluate(
        """async () => {
          const frame = document.querySelector('[role=grid]');
          const times = [];
          for (let i = 0; i < 20; i += 1) {
            const canvas = document.querySelector('.grid canvas');
            frame.scrollLeft = i * 150;
            const before = performance.now();
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            times.push(performance.now() - before);
          }
          return times.sort((a, b) => a - b)[10];
        }"""
    )
    assert milliseconds < 250  # for two frames, on a busy machine without a GPU
    assert page.evaluate("document.querySelectorAll('main *').length") < 1500


def test_new_round_appears_in_the_open_grid(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna", "ben"], rounds=2)
    page = opened(fake.address, "#/run/big")
    expect(page.get_by_role("grid")).to_have_attribute("aria-colcount", "2")
    expect(page.locator("#link")).to_have_text("live")
    fake.answers["recordings/big/grid"] = grid(["anna", "ben"], 3)
    fake.tell("recording", recording("big", rounds=2, last_round=2))
    fake.tell("recording", recording("big", rounds=3, last_round=3))
    expect(page.get_by_role("grid")).to_have_attribute("aria-colcount", "3")
    expect(page.locator("#news")).to_have_text("big: round 3 arrived")
    fake.tell("removed", {"id": "big"})
    page.get_by_role("link", name="Runs", exact=True).first.click()
    expect(page.get_by_text("No run yet.")).to_be_visible()


DONE: dict[str, Any] = {
    "state": "done",
    "version": 9,
    "result": {"attacks": [{"source": "cpl-1", "null": False, "done": 1, "skipped": 0}], "scored": True, "score_note": None},
}


@pytest.mark.parametrize(("place", "where"), [("job", "main"), ("case", "main"), ("run", "aside")])
def test_new_scores_appear_on_the_open_page(place: str, where: str, fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    fake.answers["jobs"], fake.answers["jobs/1"] = listed([job("1", **DONE)]), job("1", **DONE)
    whole = fake.answers["recordings/big/cases/cpl-1/1"]
    (scored, *_) = whole["examples"]
    whole["examples"] = [{**scored, "original": None, "label_true": None, "success": None, "psnr": None}]
    page = opened(fake.address, VIEWS[place])
    shown = page.locator(where)
    expect(shown.get_by_role("img", name=re.compile("^Reconstruction"))).to_have_count(1)
    expect(page.locator("#link")).to_have_text("live")
    page.wait_for_timeout(2500)  # until it has read again what it reads on connecting
    expect(shown.get_by_role("img", name=re.compile("^Private original"))).to_have_count(0)
    fake.answers["recordings/big/cases/cpl-1/1"] = {**whole, "examples": [scored]}
    fake.tell("recording", recording("big"))
    expect(shown.get_by_role("img", name=re.compile("^Private original"))).to_have_count(1)


@pytest.mark.parametrize("answer", ["jobs/1", "jobs"])
def test_response_older_than_an_event_is_ignored(answer: str, fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    running = job("1", state="running", started="2026-01-01T00:00:00Z", version=3)

    def late_response(query: dict[str, str]) -> Any:
        """Return the state at the time of the request, after the event of the job's end."""
        wait_until(lambda: fake.streams)
        time.sleep(0.3)
        fake.tell("job", job("1", **DONE))
        time.sleep(0.5)
        return listed([running]) if answer == "jobs" else running

    fake.answers |= {"jobs": listed([running]), "jobs/1": running, answer: late_response}
    with_answer = re.compile(f"/api/v1/{answer}(\\?.*)?$")
    page = opened(fake.address)
    with page.expect_response(with_answer):
        page.goto(f"{fake.address}#/job/1")
        page.reload()
    page.wait_for_timeout(500)
    expect(page.locator("main .mark").first).to_have_text("done")


def test_failed_request_is_shown_and_can_be_repeated(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    fake.refusals["recordings/big/grid"] = (
        503,
        {"error": {"message": "The index is being written; ask again.", "field": None, "known": None}},
    )
    page = opened(fake.address, "#/run/big", expected=("503",))
    message = page.locator(".map .state")
    expect(message).to_contain_text("The index is being written; ask again.")
    expect(page.locator("#link")).to_have_text("live")
    page.wait_for_timeout(2000)  # the page tries again by itself when it connects
    del fake.refusals["recordings/big/grid"]
    message.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("grid")).to_be_visible()
    expect(message).to_be_hidden()


def test_refused_job_is_reported_at_its_hidden_field(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    page = opened(fake.address, "#/run/big", expected=("422",))
    page.get_by_role("button", name="Attack it").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Run", exact=True)).to_have_value("big")
    fake.refusals["POST jobs"] = JOBS_REFUSED
    dialog.get_by_label("Clients").fill("anna, ben")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.get_by_label("steps", exact=True)).to_be_focused()
    steps = dialog.get_by_label("steps", exact=True)
    expect(steps).to_have_accessible_description(re.compile("steps must be at least 1, not -5"))
    ((path, body),) = fake.posted
    assert path == "jobs"
    assert body == {**job("1")["spec"], "clients": ["anna", "ben"]}


def test_only_changed_arguments_are_sent_with_their_types(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    fake.answers["POST jobs"] = job("1")
    page = opened(fake.address, "#/run/big")
    page.get_by_role("button", name="Attack it").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Arguments of the attack").click()
    dialog.get_by_label("steps", exact=True).fill("25")
    dialog.get_by_role("button", name="Start").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("CPL on")
    assert fake.posted[0][1]["arguments"] == {"steps": 25}


SMALL = """[...document.querySelectorAll('a, button, summary')]
  .filter((one) => one.checkVisibility() && getComputedStyle(one).display !== 'inline')
  .filter((one) => Math.min(one.offsetHeight, one.offsetWidth) < 24).map((one) => one.textContent)"""


@pytest.mark.parametrize("width", [320, 344, 360])
@pytest.mark.parametrize("jobs", [0, 1, 1000])
def test_top_bar_fits_a_phone_with_many_jobs(width: int, jobs: int, fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    fake.answers["jobs"] = listed([job(str(number), state="queued") for number in range(jobs)])
    page = opened(fake.address, width=width)
    busy = page.locator("#busy")
    expect(busy).to_have_text(re.compile(f"^{jobs} waiting")) if jobs else expect(busy).to_be_hidden()
    expect(page.locator("#link")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_touch_targets_are_large_and_no_keys_are_mentioned(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    page = opened(fake.address, width=360, has_touch=True, is_mobile=True)
    assert {place: page.evaluate(SMALL) for place in visit_views(page, fake)} == {place: [] for place in VIEWS}
    for keys, touched in ((page, True), (opened(fake.address), False)):
        keys.goto(f"{fake.address}#/run/big")
        expect(keys.get_by_role("grid")).to_have_accessible_description(re.compile("^Arrow keys"))
        expect(keys.get_by_text("Arrow keys move")).to_be_visible(visible=not touched)


def test_no_view_is_wider_than_a_phone(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna", "a-very-long-name-of-a-client-without-any-space-in-it"], rounds=40)
    fake.answers["jobs"] = listed([job("1", state="running"), *(job(str(number), state="queued") for number in range(2, 1001))])
    page = opened(fake.address, width=320)
    width = "document.documentElement.scrollWidth"
    too_wide = {place: found for place in visit_views(page, fake) if (found := page.evaluate(width)) > 320}
    assert too_wide == {}
    page.get_by_role("button", name="New attack").first.click()
    expect(page.get_by_role("dialog").get_by_label("Rounds")).to_be_visible()
    assert page.evaluate(
        "(d => d.scrollWidth <= d.clientWidth && d.getBoundingClientRect().right <= 320)(document.querySelector('dialog'))"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_has_enough_contrast(scheme: Any, fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna", "ben"], rounds=4)
    page = opened(fake.address, color_scheme=scheme)
    assert {place: page.evaluate(CONTRASTS) for place in visit_views(page, fake)} == {place: [] for place in VIEWS}


def test_controls_and_images_have_accessible_names(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna", "ben"], rounds=4)
    page = opened(fake.address)
    for place in visit_views(page, fake):
        assert page.evaluate(NAMELESS) == [], place
        assert page.get_by_role("heading", level=1).count() == (place != "nowhere"), place
        assert page.title().endswith("What leaks"), place


def test_theme_follows_the_system_until_it_is_selected(fake: Fake, opened: Opening) -> None:
    page = opened(fake.address, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(23, 22, 20)"
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) == "rgb(251, 250, 247)"
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert page.evaluate(paper) == "rgb(23, 22, 20)"
    page.reload()
    assert page.evaluate(paper) == "rgb(23, 22, 20)"
    page.get_by_role("button", name="Switch to the light theme").click()
    assert page.evaluate("localStorage.length") == 0


def test_no_animation_with_reduced_motion(fake: Fake, opened: Opening) -> None:
    filled(fake, clients=["anna"], rounds=2)
    page = opened(fake.address, "#/jobs", reduced_motion="reduce")
    expect(page.locator(".mark").first).to_have_text("running")
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate("document.getAnimations().length") == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_of_leakage_are_monotonic(scheme: Any, fake: Fake, opened: Opening) -> None:
    page = opened(fake.address)
    shades = page.evaluate(
        """async (theme) => {
          const { getColour } = await import('/page/scale.js');
          return Array.from({ length: 41 }, (_, i) => getColour(i / 40, theme).match(/\\d+/g).map(Number));
        }""",
        scheme,
    )
    light = [luminance(shade) for shade in shades]
    falling = scheme == "light"
    assert light == sorted(light, reverse=falling)
    assert contrast(light[0], light[-1]) > 7
    halves = [contrast(light[0], light[20]), contrast(light[20], light[-1])]
    assert min(halves) > 2  # neither half of the scale looks like one colour
    for weights in ([0.625, 0.375, 0.0], [0.0, 0.3, 0.7]):  # also without red, or without blue
        seen = [sum(w * c for w, c in zip(weights, shade, strict=True)) for shade in shades]
        assert seen == sorted(seen, reverse=falling)


def luminance(shade: list[int]) -> float:
    """Compute the relative luminance (WCAG 2.2) of an 8-bit sRGB colour."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in shade]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def visit_views(page: Page, fake: Fake) -> Iterator[str]:
    """Open all views in turn, and yield the name of each once it is drawn completely."""
    for name, place in VIEWS.items():
        page.goto("about:blank")  # so that the previous view is not taken for this one
        page.goto(fake.address + place)
        expect(page.get_by_text("nothing at this address") if name == "nowhere" else page.locator("main h1")).to_be_visible()
        expect(page.get_by_text("Loading.").locator("visible=true")).to_have_count(0)
        yield name
