"""Published attacks: each composes parts, and cites its paper."""
