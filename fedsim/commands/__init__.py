"""Commands of `fedsim`, one or a few per module."""
