"""R-GAP: the input of a network, layer by layer from the last (Zhu and Blaschko 2021)."""
