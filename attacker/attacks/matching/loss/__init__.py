"""The loss of a search: its part that belongs to one observation of every case, its other terms, its weights and thresholds."""
