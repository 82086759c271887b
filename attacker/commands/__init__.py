"""The commands of the attacker, one a module; what is slow to import is imported where it is used."""
