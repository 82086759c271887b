"""Commands of the command line `attacker`, and what several of them share."""
