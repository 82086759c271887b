"""The closed form `linear`, for networks that begin with a linear layer: its inputs, of one example or a batch, and labels."""
