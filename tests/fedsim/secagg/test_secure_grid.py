"""Test of the number of clients that the grid for secure aggregation accepts."""

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from protocol_round import agreed

from fedsim.engine.engines import LocalGrid
from fedsim.secagg.grid import SecureGrid


def test_more_clients_than_agreed_are_refused() -> None:
    """The sum of more clients than agreed could overflow 32 bits unnoticed."""
    grid = LocalGrid(ClientApp(), 6)
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    with pytest.raises(ValueError, match="6 clients are asked in one round, but secure aggregation was agreed for 5"):
        SecureGrid(grid, agreed(5)).send_and_receive(messages)
