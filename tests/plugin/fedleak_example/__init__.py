"""An example of a package that extends fedleak. Its entry points are in pyproject.toml."""
