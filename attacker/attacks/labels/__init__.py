"""Label inference from the gradient of the last layer."""
