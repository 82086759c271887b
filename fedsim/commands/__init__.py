"""Commands of the `fedsim` command line; what is slow to import is imported where it is used."""
