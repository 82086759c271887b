"""Tests that generated pages are up to date, that the README is short, and that the site has all pages."""

import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

from attacker.attacks.registry import ATTACKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generator: ModuleType) -> None:
    for path, text in generator.pages().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: run `make reference`"


def test_every_command_and_option_is_in_the_reference(generator: ModuleType) -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for heading in ("fedsim run", "fedsim import", "attacker replay", "attacker score", "attacker serve"):
        assert f"### {heading}\n" in text
    assert "`--knows" not in text  # an argument of attacks, and no option
    assert "| `--resume` |" in text


def test_the_readme_can_be_read_in_ten_minutes_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target


def test_modules_and_functions_named_in_the_pages_exist() -> None:
    """Names of two parts are not checked, since groups of entry points and files, such as defenses.md, have them, too."""
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    named = set(re.findall(r"\b(?:attacker|fedsim|defenses)(?:\.[A-Za-z_]\w*){2,}", "\n".join(pages)))
    assert len(named) > 30
    for name in sorted(named):
        pkgutil.resolve_name(name)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages |= {f"results/{page.name}" for page in (ROOT / "docs" / "results").glob("*.md")}
    assert named == pages


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_every_attack_has_idea_needs_arguments_results_limits_and_paper(attack: str) -> None:
    text = "\n".join((ROOT / "docs" / name).read_text() for name in ("attacks.md", "many-rounds.md"))
    (section,) = (part for part in text.split("\n## ")[1:] if attack in part.splitlines()[0].split(" and "))
    for part in ("Idea", "Needs", "Arguments", "Results", "Limits", "Paper"):
        assert f"\n**{part}.**" in section or f"\n### {part}\n" in section, part
