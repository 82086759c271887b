"""Privacy of noisy updates: their noise and sensitivity, the accountant's epsilon, and an empirical bound from canaries."""
