"""Jinja environment of the pages: report, audit and sweep."""

import re
from base64 import b64encode

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def make_environment(package: str) -> Environment:
    """Return an environment that finds templates in `package`, and then in `attacker.report`, which has the common parts.

    Values are escaped for HTML, and an undefined name in a template raises jinja2.UndefinedError. The filter `data_uri` turns the
    bytes of a PNG file into an address that a page can hold, and `code` sets words between backticks as code.
    """
    loader = ChoiceLoader([PackageLoader(name, package_path="") for name in dict.fromkeys((package, "attacker.report"))])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = lambda png: f"data:image/png;base64,{b64encode(png).decode()}"
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    return environment
