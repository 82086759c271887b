"""Inference of labels from the gradient of the last layer."""
