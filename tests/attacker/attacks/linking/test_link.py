"""Tests of linking (finding the same examples in several rounds) on constructed epochs, also with defective rounds."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.linking import Links, RoundDescription, link

CLASSES = 5


class Client:
    """A client's examples, and the descriptions that an attacker gets of rounds with some of them."""

    def __init__(self, examples: int = 24, *, noise: float = 0.1, seed: int = 0) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.features = torch.randn(examples, 32, generator=self.rng)
        self.labels = torch.arange(examples) % CLASSES
        self.noise = noise

    def order(self) -> list[int]:
        return torch.randperm(len(self.labels), generator=self.rng).tolist()

    def epochs(self, count: int, batch: int) -> list[list[int]]:
        orders = [self.order() for _ in range(count)]
        return [order[i : i + batch] for order in orders for i in range(0, len(order), batch)]

    def seen(self, round: int, used: list[int], **changes: str) -> RoundDescription:
        noise = self.noise * torch.randn(len(used), 32, generator=self.rng)
        return RoundDescription(round, self.labels[used], self.features[used] + noise, **changes)

    def rounds(self, batches: list[list[int]]) -> list[RoundDescription]:
        return [self.seen(number, used) for number, used in enumerate(batches, start=1)]


def linked(links: Links, batches: list[list[int]]) -> tuple[int, int]:
    """Return how many places are linked correctly and wrongly to an earlier one."""
    true: dict[int, int] = {}
    right = wrong = 0
    for places, used in zip(links.places, batches, strict=True):
        for place, index in zip(places.tolist(), used, strict=True):
            if place in true:
                right, wrong = right + (true[place] == index), wrong + (true[place] != index)
            true.setdefault(place, index)
    return right, wrong


def all_notes(links: Links) -> str:
    return "; ".join(links.notes)


@pytest.mark.parametrize("batch", [1, 4, 5])
@pytest.mark.parametrize("epochs", [2, 3])
def test_every_example_is_linked_in_every_epoch(epochs: int, batch: int) -> None:
    client = Client()
    batches = client.epochs(epochs, batch)
    links = link(client.rounds(batches), batch_size=batch)
    assert linked(links, batches) == (24 * (epochs - 1), 0)
    assert links.examples == 24
    assert sorted(set(links.epochs)) == list(range(1, epochs + 1))
    assert links.epochs == tuple(1 + i * epochs // len(batches) for i in range(len(batches)))
    firsts = [places.tolist() for places in links.places]
    assert links.labels is not None
    assert all(
        links.labels[e] == client.labels[i]
        for own, used in zip(firsts, batches, strict=True)
        for e, i in zip(own, used, strict=True)
    )


def test_greedy_matching_links_every_example() -> None:
    client = Client()
    batches = client.epochs(3, 4)
    assert linked(link(client.rounds(batches), batch_size=4, matching="greedy", min_certainty=0.0), batches) == (48, 0)


def test_threshold_leaves_doubtful_examples_unlinked() -> None:
    client = Client(60, noise=1.0)
    batches = client.epochs(2, 4)
    rounds = client.rounds(batches)
    careful, careless = (link(rounds, batch_size=4, min_certainty=least) for least in (0.15, 0.0))
    right, wrong = linked(careful, batches)
    assert linked(careless, batches)[1] > wrong
    assert right > 5 * wrong
    assert "too uncertain to be linked" in all_notes(careful)
    assert careful.examples > careless.examples


def test_images_are_linked_if_there_are_no_features() -> None:
    client = Client()
    images = torch.rand(24, 3, 8, 8, generator=client.rng)
    batches = client.epochs(2, 3)
    rounds = [
        RoundDescription(
            number, client.labels[used], images=images[used] + 0.05 * torch.randn(len(used), 3, 8, 8, generator=client.rng)
        )
        for number, used in enumerate(batches, start=1)
    ]
    assert linked(link(rounds, batch_size=3), batches) == (24, 0)


def test_examples_of_one_label_are_told_apart() -> None:
    client = Client()
    client.labels = torch.zeros(24, dtype=torch.int64)
    batches = client.epochs(2, 4)
    assert linked(link(client.rounds(batches), batch_size=4), batches) == (24, 0)


def test_single_epoch_has_no_links() -> None:
    client = Client(40)
    batches = client.epochs(1, 4)
    links = link(client.rounds(batches), batch_size=4)
    assert linked(links, batches) == (0, 0)
    assert "no second pass" in all_notes(links)


def test_unreadable_round_is_kept_unlinked_and_noted() -> None:
    client = Client()
    batches = client.epochs(2, 4)
    rounds = client.rounds(batches)
    rounds[2] = RoundDescription(3, torch.zeros(4, dtype=torch.int64), problem="its update holds NaN")
    links = link(rounds, batch_size=4)
    assert "round 3: its update holds NaN; its examples are not linked" in links.notes
    assert [len(places) for places in links.places] == [4] * 12
    assert links.examples == 24 + 4
    assert not any(set(links.places[2].tolist()) & set(other.tolist()) for i, other in enumerate(links.places) if i != 2)
    right = [place for i, place in enumerate(links.places) if i != 2]
    assert linked(Links((*right, links.places[2]), links.confidence), [*batches[:2], *batches[3:], [-1] * 4]) == (20, 0)


def test_rounds_are_linked_across_missing_ones_which_are_noted() -> None:
    client = Client()
    batches = client.epochs(2, 4)
    kept = [i for i in range(12) if i not in (1, 7, 8)]
    links = link([client.seen(i + 1, batches[i]) for i in kept], batch_size=4, min_certainty=0.2)
    seen = [batches[i] for i in kept]
    twice = {i for used in seen[:5] for i in used} & {i for used in seen[5:] for i in used}
    assert linked(links, seen) == (len(twice), 0)
    assert "no usable round of this client between rounds 1 and 3, 7 and 10" in all_notes(links)


def test_incomplete_second_epoch_is_linked() -> None:
    client = Client()
    batches = client.epochs(2, 4)[:9]
    links = link(client.rounds(batches), batch_size=4)
    assert linked(links, batches) == (12, 0)
    assert "pass 2: rounds 7 to 9, 12 examples of 24, so it is probably incomplete, 12 linked to earlier ones" in links.notes


def test_start_of_a_short_last_epoch_is_found() -> None:
    client = Client()
    batches = client.epochs(4, 4)[:19]
    links = link(client.rounds(batches), batch_size=4)
    assert links.epochs == (1,) * 6 + (2,) * 6 + (3,) * 6 + (4,)
    assert linked(links, batches) == (52, 0)


def test_batches_of_changing_size_are_linked_and_noted() -> None:
    client = Client()
    first, second = client.order(), client.order()
    batches = [first[:8], first[8:16], first[16:], *(second[i : i + 3] for i in range(0, 24, 3))]
    links = link(client.rounds(batches), batch_size=8)
    assert linked(links, batches) == (24, 0)
    assert "3 examples in most rounds, 8 in round 1" in all_notes(links)
    links = link(client.rounds([batches[0][:1], batches[1][:1], batches[2][:3]]), batch_size=1)
    assert "1 example in most rounds, 3 in round 3" in all_notes(links)


def test_rounds_of_whole_epochs_are_linked() -> None:
    client = Client(6)
    batches = client.epochs(3, 6)
    assert linked(link(client.rounds(batches), batch_size=2, whole_passes=True), batches) == (12, 0)


def test_rounds_without_any_description_are_kept() -> None:
    none = torch.zeros(2, dtype=torch.int64)
    links = link([RoundDescription(1, none, problem="its update holds NaN"), RoundDescription(4, none)], batch_size=2)
    assert links.examples == 4
    assert "round 4: neither features nor images are known; its examples are not linked" in links.notes


def test_links_do_not_depend_on_the_scale_of_features() -> None:
    client = Client(noise=0.5)
    batches = client.epochs(2, 4)
    rounds = client.rounds(batches)
    larger: list[RoundDescription] = [one._replace(features=1000 * _features(one)) for one in rounds]
    for a, b in zip(link(rounds, batch_size=4).places, link(larger, batch_size=4).places, strict=True):
        assert a.tolist() == b.tolist()


def _features(one: RoundDescription) -> Tensor:
    assert one.features is not None
    return one.features


def test_invalid_arguments_are_refused() -> None:
    client = Client()
    with pytest.raises(ValueError, match="needs at least one observation"):
        link([], batch_size=1)
    with pytest.raises(ValueError, match="each round once, but round 2 precedes round 1"):
        link([client.seen(2, [0]), client.seen(1, [0])], batch_size=1)
    with pytest.raises(ValueError, match="round 1 must have as many features as labels, got 2 features and 1 labels"):
        link([client.seen(1, [0, 1])._replace(labels=torch.tensor([0]))], batch_size=1)
    with pytest.raises(ValueError, match="contain NaN or infinite values"):
        link([RoundDescription(1, torch.tensor([0]), torch.full((1, 3), torch.nan))], batch_size=1)
    with pytest.raises(ValueError, match="'assignment' or 'greedy', got 'best'"):
        link([client.seen(1, [0])], batch_size=1, matching="best")


def test_many_short_passes_stay_apart_if_the_first_resembles_later_ones_less() -> None:
    """Without a limit of the similarity, the nearest rounds decide, and several passes are taken for one."""
    client = Client(8, noise=0.05)
    batches = client.epochs(5, 4)
    drift = torch.randn(8, 32, generator=client.rng)
    described = [
        one._replace(features=one.features + 0.7 * drift[used] / one.round)
        for one, used in zip(client.rounds(batches), batches, strict=True)
    ]
    links = link(described, batch_size=4)
    assert links.epochs == (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert linked(links, batches) == (32, 0)
