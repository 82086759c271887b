"""Tests of the web page with runs of table rows, of secure sums, and of attacks on several rounds."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from federations import federate
from page_service import asked, serving
from page_watched import Opening
from playwright.sync_api import expect

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from fedsim.recording import Recording

pytestmark = pytest.mark.page

MLP = {"name": "mlp", "hidden": [16]}
KINDS: dict[str, tuple[dict[str, Any], AttackSpec]] = {
    "table": ({"rounds": 1, "model": MLP, "data": "breast_cancer"}, AttackSpec(name="exact")),
    "sums": (
        {"rounds": 1, "model": MLP, "data": "digits", "secure_aggregation": {"threshold": 2, "clip": 4.0}},
        AttackSpec(name="exact", arguments={"steps": 2}),
    ),
    "many": (
        {"rounds": 3, "model": "lenet_dlg", "data": "digits"},
        AttackSpec(name="agic", arguments={"steps": 5, "pre_steps": 5}),
    ),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a service on one run of each kind, attacked (with nulls) and scored."""
    root = tmp_path_factory.mktemp("kinds") / "runs"
    root.mkdir()
    for name, (keys, spec) in KINDS.items():
        federate(root / name, **keys)
        scorer = Scorer(root / name, [root / name / "truth"])
        for null in (False, True):
            attack = AttackSpec(name=spec.name, arguments=spec.arguments, null=null)
            recording = Recording(root / name / "recording")
            scorer.score(Replay(recording=recording, spec=attack, out=root / name / "reconstructions").run().folder)
    with serving(root, "--truth", "own", "--workers", "0") as address:
        yield address


def first_case(service: str, run: str) -> dict[str, Any]:
    cases = asked(service, f"recordings/{run}/cases?limit=200")["items"]
    return next(one for one in cases if one["status"] == "done" and "null" not in one["attack"])


def address_of(run: str, case: dict[str, Any]) -> str:
    return f"#/run/{run}/case/{case['attack']}/{case['case']}"


def test_table_row_is_shown_by_value_with_original_and_null(kinds: str, opened: Opening) -> None:
    case = first_case(kinds, "table")
    page = opened(kinds, address_of("table", case))
    heads = page.locator("table.cells thead th")
    expect(heads).to_have_text(["column", "private original", "reconstruction", "the null"])
    row = page.locator("table.cells tbody tr").filter(has=page.get_by_role("rowheader", name="mean radius", exact=True))
    original, found, nothing = (row.locator("td").nth(n).inner_text() for n in range(3))
    assert found == f"{original} ✓"
    assert nothing != original
    page.goto(f"{kinds}#/run/table?cell={case['rounds'][0]}@{case['client']}")
    chosen = page.get_by_role("complementary", name="The chosen cell")
    expect(chosen.get_by_role("rowheader", name="worst area")).to_have_count(1)
    expect(chosen.get_by_role("img")).to_have_count(0)
    expect(page.get_by_role("button", name="PSNR, dB")).to_have_count(0)


def test_secure_sum_is_attacked_and_masked_updates_are_marked(kinds: str, opened: Opening) -> None:
    masked = asked(kinds, "recordings/sums/grid")["clients"][0]
    page = opened(kinds, f"#/run/sums?cell=1@{masked}")
    chosen = page.get_by_role("complementary", name="The chosen cell")
    expect(chosen).to_contain_text("masked by secure aggregation: the server can read only the sum of the round's updates.")
    expect(page.locator("header.head")).to_contain_text("secure aggregation")
    page.goto(f"{kinds}#/run/sums?cell=1@sum")
    expect(chosen.get_by_role("img", name=re.compile("^Private original"))).to_have_count(2)  # one of each client
    expect(page.get_by_label("Client").locator("option")).to_have_text(["all", *asked(kinds, "recordings/sums/grid")["clients"]])


def test_each_example_of_several_rounds_has_its_null(kinds: str, opened: Opening) -> None:
    case = first_case(kinds, "many")
    page = opened(kinds, address_of("many", case))
    expect(page.locator(".eyebrow")).to_contain_text("rounds 1 to 3")
    figures = page.locator("figure.pair")
    expect(figures).to_have_count(3)
    for round, figure in enumerate(figures.all(), start=1):
        expect(figure).to_contain_text(f"round {round}, batch 1, position 0")
    nulls = page.get_by_role("img", name=re.compile("^The null"))
    addresses = [str(one.get_attribute("src")).partition("?")[0] for one in nulls.all()]
    assert [address.rpartition("/")[2] for address in addresses] == ["0.png", "1.png", "2.png"]
    expect(page.get_by_role("img", name=re.compile("^Private original"))).to_have_count(3)
