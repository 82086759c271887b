"""Replay of a recording: cases, batches, tasks, checkpoints and the files of reconstructions."""
