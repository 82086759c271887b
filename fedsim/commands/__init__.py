"""Commands of the `fedsim` command line."""
