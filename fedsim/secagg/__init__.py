"""Secure aggregation: clients mask their updates, so that the server learns the sum of the updates but no single one.

The protocol is SecAgg (Bonawitz et al. 2017) over a graph in which each client has some of the others as neighbours (SecAgg+,
Bell et al. 2020). A round has four exchanges between the server and its clients:

1. setup:   each client advertises two public keys, one for masks and one for encrypting shares.
2. share:   each client splits two secrets into shares for its neighbours: the private key of the masks that it has in common with
            each neighbour, and the seed of its own mask. The client keeps one share of this seed.
3. collect: each client trains, applies its defense, quantises, and sends the result plus its own mask and, for each neighbour,
            plus or minus their common mask. The common masks cancel in the sum.
4. unmask:  clients reveal shares of the seeds of clients whose vectors are in the sum, and of the mask keys of clients that
            dropped out before they sent a vector, so that the server can remove the masks that remain.

Security against a server that follows the protocol: together with fewer than `threshold` clients it learns, of the updates of
the other clients, nothing but their sum. If not all clients are neighbours, these other clients must also be connected with each
other; fewer than `neighbours` clients that collude or drop out cannot disconnect them.

A server that breaks the protocol can read single updates: public keys are not authenticated, so that it can replace them by its
own. Clients refuse only obvious deviations, such as too few neighbours or a request for both secrets of one client.

Not hidden are the names of the clients that took part, the total number of examples, the number of clipped coordinates, and what
several sums reveal together. A client that sends a wrong vector spoils the sum, as without masks, or the round is lost (it ends
without a sum).
"""
