"""Jobs of the service: the durable queue, and the history of the rules that submit jobs for new rounds."""
