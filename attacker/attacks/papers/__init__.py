"""Functions that build attacks from parts; most follow a paper, which they cite."""
