"""Attacks that use several rounds together, of one client (`agic`, `accumulate`, `spans`) or of secure sums (`cohort_spans`)."""
