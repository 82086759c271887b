"""The protocol of secure aggregation, independent of Flower: secret sharing, masks, and the parts of clients and server."""
