"""Image priors: enhancers, denoisers, autoencoders and generators with their training, untrained networks; the distance LPIPS."""
