"""What the grid refuses before it asks anybody."""

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from played import agreed

from fedsim.engine.engines import LocalGrid
from fedsim.secagg.grid import SecureGrid


def test_more_clients_than_the_words_have_room_for_are_not_asked() -> None:
    """Their sum could go once around 32 bits, unseen."""
    grid = LocalGrid(ClientApp(), 6)
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    with pytest.raises(ValueError, match="6 clients are asked in one round, but secure aggregation was agreed for 5"):
        SecureGrid(grid, agreed(5)).send_and_receive(messages)
