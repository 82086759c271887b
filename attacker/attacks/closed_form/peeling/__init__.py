"""The closed form `peeled`, for networks in which a layer has fewer equations than unknowns."""
