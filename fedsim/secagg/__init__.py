"""Secure aggregation: the server learns the sum of the clients' updates, and no client's own.

SecAgg (Bonawitz et al. 2017) over a graph of neighbours (SecAgg+, Bell et al. 2020), in four exchanges a round:

1. setup:   each client advertises two public keys, one for masks and one for shares.
2. share:   each client splits the private key of its masks, and the seed of a mask of its own, among its neighbours.
3. collect: each client trains, defends, quantises, and sends its update under its own mask and one for each neighbour, which
            the neighbour subtracts.
4. unmask:  neighbours give shares of the seeds of those whose vectors are in the sum, and of the keys of those that dropped out.

The server is honest but curious, and together with fewer than `threshold` clients it learns nothing but the sum over the
others, where all are neighbours. In a sparser graph the others must still be linked with each other: fewer than `neighbours`
clients that help the server or drop out cannot change that. Against a server that lies there is no defense beyond what a client
refuses: keys that come twice, fewer neighbours or survivors than the threshold, a second vector under the same keys, both kinds
of shares of one peer. Nothing authenticates public keys, so a lying server could stand in for a client's neighbours; and under
a threshold of half of those that hold shares, or less, it could ask some for the one kind of shares and some for the other. A
client that sends nonsense spoils the sum, as it could without masks, or loses the round.
What a sum says is not hidden: who took part, the total of examples, and how many coordinates were clipped. Nor is what several
sums say together: a round that is asked for again, after a crash of the server, may be summed over other clients.
"""
