"""Commands of the attacker, one per module. Packages that are slow to import are imported inside the functions that use them."""
