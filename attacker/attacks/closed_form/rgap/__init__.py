"""R-GAP: the attack that solves for the input of each layer, from the last layer to the first (Zhu and Blaschko 2021)."""
