"""Image priors and their training: enhancers, denoisers, autoencoders, generators; LPIPS; the attack `learning_to_invert`."""
