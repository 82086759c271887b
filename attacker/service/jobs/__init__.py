"""Jobs of the service: the durable queue, and the rules that submit jobs for new rounds."""
