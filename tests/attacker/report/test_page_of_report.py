"""Tests of the headline of the report, of its explanations, and of narrow screens."""

from html.parser import HTMLParser
from typing import Any

import pytest

from fedsim.recording import Column

Attributes = list[tuple[str, str | None]]


class Tables(HTMLParser):
    """A parsed page: the class of every table, and the cells of stacked tables that lack a label."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.unlabelled: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        found = dict(attrs)
        if tag == "table":
            self.classes.append(found.get("class") or "")
        elif tag == "td" and "stacked" in self.classes[-1] and not ({"data-label", "colspan"} & found.keys()):
            self.unlabelled.append(str(attrs))


def test_each_pair_has_psnr_and_label_of_the_null(attacked: Any, report: Any) -> None:
    text = report(attacked).text
    assert text.count("cat → cat ✓, null dog ✗") == 4
    assert text.count("✓ recovered 40.0 dB, null 10.0 dB") == 4
    attacked.rewrite(lambda row: None if row["null"] and row["index"] == 0 else row)
    page = report(attacked)
    assert page.text.count(", null 10.0 dB") == 3 + 1  # the last one is the mean
    assert page.text.count("not run on this case") == 1


def test_null_is_explained_before_the_word_is_used(run: Any, report: Any) -> None:
    run.attack("cpl", success=False)
    explained = "The baseline of an attack is the same attack without the update. It is called the null"
    before, found, after = report(run).text.partition(explained)
    assert found
    assert "null" not in before
    assert "not distinguishable from the null" in after


def test_headline_states_coverage_and_failures(attacked: Any, report: Any) -> None:
    coverage = "1 attack on 4 of 4 updates: 4 of 4 cases finished, none failed; 1 reply of clients held no update."
    assert coverage in report(attacked).text.partition("Contents")[0]
    path = next(attacked.path.glob("reconstructions/cpl-0*/*.safetensors"))
    path.unlink()
    path.with_suffix(".failed.json").write_text('{"reason": "out of memory"}')
    attacked.attack("dlg")
    assert "2 attacks on 4 of 4 updates: 8 of 8 cases finished, 1 failed;" in report(attacked).text.partition("Contents")[0]


def test_headline_states_the_means_of_attack_and_null(attacked: Any, report: Any) -> None:
    assert "Mean PSNR of all examples 40.0 dB, null 10.0 dB." in report(attacked).text.partition("Contents")[0]
    attacked.rewrite(lambda row: None if row["null"] else row)
    page = report(attacked)
    assert "Mean PSNR of all examples 40.0 dB." in page.text
    assert not any("The null" in str(attributes.get("alt")) for _, attributes in page.tags)


@pytest.mark.parametrize("columns", [(), (Column(name="age", low=20, high=60),)], ids=["images", "rows"])
def test_every_table_is_stacked_on_a_narrow_screen(make_run: Any, report: Any, columns: Any) -> None:
    run, other = make_run(columns=columns), make_run("second", name="second", columns=columns)
    run.attack()
    other.attack()
    tables = Tables(report(run, other).html)
    assert sum("stacked" in one for one in tables.classes) == 1 + 2 * 4  # comparison; knowledge, scores, growth, rounds of each
    assert all("stacked" in one or one == "cells" for one in tables.classes)
    assert tables.unlabelled == []


def test_further_pairs_and_charts_of_several_runs_are_folded(make_run: Any, report: Any) -> None:
    run, other = make_run(), make_run("second", name="second")
    run.attack()
    assert "1 more pair " in report(run).text
    folds = [[attributes for tag, attributes in page.tags if tag == "details"] for page in (report(run), report(run, other))]
    assert [sum("open" in one for one in found) for found in folds] == [3, 0]  # open: contents, losses and training
