"""Functions that build attacks from parts; most of the attacks follow a paper, which the function cites."""
