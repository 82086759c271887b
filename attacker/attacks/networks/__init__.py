"""Views of a network for attacks, such as a chain of layers traced by torch.fx, and a twice differentiable forward pass."""
