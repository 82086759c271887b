"""The attacker: replays a recording, reconstructs, scores and reports."""
