"""Commands of `fedsim`, one or a few per module. Packages that are slow to import are imported inside the functions."""
