"""Networks as chains of layers, traced by torch.fx, for attacks that go through them layer by layer."""
