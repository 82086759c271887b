"""Rank analysis: whether a network's layer shapes let the gradient of one example determine its input (R-GAP, section 4)."""
