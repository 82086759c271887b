"""Learned image priors: an enhancer that sharpens reconstructions, and autoencoders whose latents are searched."""
