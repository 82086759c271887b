"""Learned image priors and their training: enhancers that sharpen reconstructions, and autoencoders for searched latents."""
