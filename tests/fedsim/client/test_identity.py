"""Tests of a client's pseudonym and secret: stable, different for each client, and independent of the server's public seed."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.client.identity import ClientIdentity, load_or_draw


def draw_values(identity: ClientIdentity, round: int) -> list[float]:
    values: list[float] = torch.randn(5, generator=identity.make_generator(round)).tolist()
    return values


def test_an_identity_is_drawn_once_and_kept(tmp_path: Path) -> None:
    first = load_or_draw(tmp_path / "a", 0, seed=None)
    assert load_or_draw(tmp_path / "a", 0, seed=None) == first
    assert load_or_draw(tmp_path / "a", 7, seed=99) == first
    assert json.loads((tmp_path / "a" / "identity.json").read_text()) == {"pseudonym": first.pseudonym, "secret": first.secret}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "identity.json").stat().st_mode) == 0o600


def test_the_folder_of_all_clients_is_closed_to_other_users_as_well(tmp_path: Path) -> None:
    load_or_draw(tmp_path / "clients" / "partition-00000", 0, seed=1)
    assert stat.S_IMODE((tmp_path / "clients").stat().st_mode) == 0o700


@pytest.mark.parametrize("seed", [None, 0])
def test_clients_share_neither_pseudonym_nor_secret(tmp_path: Path, seed: int | None) -> None:
    drawn = [load_or_draw(tmp_path / str(i), i, seed=seed) for i in range(20)]
    assert len({i.pseudonym for i in drawn}) == 20
    assert len({i.secret for i in drawn}) == 20
    assert all(len(bytes.fromhex(i.secret)) == 32 for i in drawn)
    assert not any(i.pseudonym in i.secret or i.secret in i.pseudonym for i in drawn)


def test_a_seed_repeats_and_another_or_none_differs(tmp_path: Path) -> None:
    def drawn(folder: str, seed: int | None) -> ClientIdentity:
        return load_or_draw(tmp_path / folder, 3, seed=seed)

    assert drawn("a", 1) == drawn("b", 1)
    others = [drawn("a", 1), drawn("c", 2), drawn("d", None), drawn("e", None)]
    assert len({i.secret for i in others}) == len({i.pseudonym for i in others}) == 4


def test_noise_differs_between_rounds_and_between_clients() -> None:
    """If two clients drew the same noise, the server could cancel it by subtracting their updates."""
    anna, bert = ClientIdentity("a", "11" * 32), ClientIdentity("b", "22" * 32)
    streams = [draw_values(anna, 1), draw_values(anna, 2), draw_values(bert, 1), draw_values(bert, 2)]
    assert len({tuple(s) for s in streams}) == 4
    assert draw_values(anna, 1) == streams[0]


def test_noise_and_order_depend_on_the_secret_and_not_on_the_pseudonym() -> None:
    one, two = ClientIdentity("same", "11" * 32), ClientIdentity("same", "22" * 32)
    assert draw_values(one, 1) != draw_values(two, 1)
    assert draw_values(ClientIdentity("other", "11" * 32), 1) == draw_values(one, 1)
    assert not np.array_equal(one.draw_order(0, 50, shuffle=True), two.draw_order(0, 50, shuffle=True))


@pytest.mark.parametrize("size", [1, 2, 50])
def test_the_order_of_examples_is_a_new_permutation_in_every_epoch(size: int) -> None:
    identity = ClientIdentity("a", "ab" * 32)
    orders = [identity.draw_order(epoch, size, shuffle=True) for epoch in range(4)]
    assert all(sorted(order.tolist()) == list(range(size)) for order in orders)
    assert np.array_equal(identity.draw_order(2, size, shuffle=True), orders[2])
    if size == 50:
        assert len({tuple(order) for order in orders}) == 4


def test_an_order_comes_from_the_secret_and_not_from_public_numbers() -> None:
    """Secrets alone change the order of examples, so that a server cannot compute it from epoch and size."""
    orders = {tuple(ClientIdentity("p", f"{n:064x}").draw_order(1, 20, shuffle=True)) for n in range(50)}
    assert len(orders) == 50
    firsts = np.array([order[0] for order in orders])
    assert len(set(firsts)) > 8  # first examples differ as well


def test_without_shuffling_examples_keep_their_order() -> None:
    assert ClientIdentity("p", "00").draw_order(3, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_noise_and_order_are_drawn_from_different_streams() -> None:
    identity = ClientIdentity("p", "ab" * 32)
    assert identity._derive_seed("defense", 1) != identity._derive_seed("order", 1)
    assert len({identity._derive_seed(purpose, n) for purpose in ("defense", "order") for n in range(200)}) == 400
