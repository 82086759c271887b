"""Rank analysis: whether the shapes of a network determine its input (R-GAP, section 4)."""
