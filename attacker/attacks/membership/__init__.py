"""The attack `membership`: names which images of a pool, known to the attacker, are among a client's training examples."""
