"""The attacker as a web service: an index of recordings, a durable job queue, an HTTP API, and a web page of the results."""
