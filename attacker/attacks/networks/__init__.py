"""Views of a network for attacks: as a chain of layers traced by torch.fx, and as a twice differentiable forward pass."""
