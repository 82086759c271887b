"""Learned image priors and their training: enhancers, denoisers, autoencoders and generators; and the distance LPIPS."""
