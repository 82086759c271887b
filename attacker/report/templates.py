"""Jinja environment of the pages: report, audit and sweep."""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def make_environment(package: str) -> Environment:
    """Return an environment that finds templates in `package`, and then in `attacker.report`, which has the common parts.

    Values are escaped for HTML, and an undefined name in a template raises jinja2.UndefinedError.
    """
    loader = ChoiceLoader([PackageLoader(name, package_path="") for name in dict.fromkeys((package, "attacker.report"))])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
