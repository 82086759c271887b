"""The attacker as a service: recordings below one folder, jobs that survive, and a page that shows what leaks."""
