"""Secure aggregation: the server learns the sum of the clients' updates, but no single update.

The protocol is SecAgg (Bonawitz et al. 2017) over a graph of neighbours (SecAgg+, Bell et al. 2020). A round has four exchanges:

1. setup:   each client advertises two public keys, one for masks and one for shares.
2. share:   each client splits two secrets among its neighbours: the private key of its pairwise masks, and the seed of its own
            mask.
3. collect: each client trains, applies its defense, quantises, and sends its update plus its own mask plus one mask per
            neighbour, which the neighbour subtracts.
4. unmask:  neighbours reveal shares of the seeds of clients whose vectors are in the sum, and of the keys of clients that
            dropped out.

Security against an honest-but-curious server: together with fewer than `threshold` clients it learns nothing but the sum over the
other clients, if all clients are neighbours. In a sparser graph the other clients must also be connected with each other; fewer
than `neighbours` clients that collude or drop out cannot disconnect them.

Security against a lying server is limited to what a client refuses: repeated keys, fewer neighbours or survivors than the
threshold, a second vector under the same keys, and both kinds of shares of one peer. Public keys are not authenticated, so a
lying server could impersonate a client's neighbours. With a threshold of at most half of the share holders, it could ask some
for one kind of shares and the rest for the other. A client that sends a wrong vector spoils the sum, as without masks, or the
round is lost.

Not hidden are the names of the clients that took part, the total number of examples, the number of clipped coordinates, and what
several sums reveal together. A round that is repeated after a crash of the server keeps its cohort or is lost, since the
difference of two sums over cohorts that differ by one client is that client's update (`fedsim.secagg.cohorts`).
"""
