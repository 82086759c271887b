"""Tests of the rank analysis of R-GAP's equations: against the paper's numbers, explicit matrices, and results of the attack."""

from math import prod

import pytest
import torch
from support.rgap.rank_trials import (
    PAPER_NETWORKS,
    RandomNetwork,
    analyse_ranks,
    compute_numerical_ranks,
    compute_rank,
    make_paper_network,
    make_random_network,
    write_matrix,
)
from torch import nn
from torch.func import functional_call, grad, jacfwd

from attacker.attacks.closed_form.rank.analysis import RankReport, analyse_rank, count_virtual_constraints
from attacker.attacks.closed_form.rgap.footprint import find_used_values
from attacker.attacks.closed_form.rgap.recursion import RgapSettings, solve_last_layer, solve_layers
from attacker.attacks.closed_form.rgap.system import EquationValues, LayerSystem, apply_maps
from attacker.attacks.networks.chain import read_chain
from attacker.commands.rank_output import make_table, write_headline, write_verdict
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

THIRTY = range(30)


def report_of(name: str, shape: tuple[int, ...] = (3, 32, 32), classes: int = 2, prove: int = 0) -> RankReport:
    model = models.build_layout(ModelSpec(name=name), DataSpec(shape=shape, num_classes=classes))
    return analyse_rank(read_chain(model, shape), prove=prove)


def analyse_convolutions(*layers: nn.Module, shape: tuple[int, ...], dead: float = 0.5, prove: int = 3000) -> RankReport:
    with torch.device("meta"):
        features = nn.Sequential(*layers, nn.Flatten())
        width = prod(features(torch.empty(1, *shape)).shape)
    return analyse_rank(read_chain(nn.Sequential(*features, nn.Linear(width, 3)), shape), dead=dead, prove=prove)


# the paper


@pytest.mark.parametrize(("index", "channels"), [(-484, (4,)), (405, (3,)), (-208, (9, 4)), (316, (6, 10, 4))])
def test_the_indices_of_the_papers_table_2(index: int, channels: tuple[int, ...]) -> None:
    assert PAPER_NETWORKS[index] == channels
    report = analyse_rank(read_chain(make_paper_network(channels), (3, 32, 32)), prove=0)
    assert report.index == index
    assert report.layers[report.critical].index == index
    assert report.critical == len(channels) - 1


def test_the_fourth_network_of_the_paper_needs_its_virtual_constraints() -> None:
    chain = read_chain(make_paper_network((9, 4)), (3, 32, 32))
    second = analyse_rank(chain, prove=0).layers[1]
    assert (second.unknowns, second.gradients, second.weights) == (9 * 29**2, 9 * 4 * 16, 4 * 26**2)
    assert second.virtual == count_virtual_constraints(chain)[1] == 9 * 29**2 - 3 * 32**2
    assert second.index + second.virtual > 0 > second.index


def test_missing_equations_of_a_layer_reduce_the_virtual_constraints_of_the_next() -> None:
    first, second = analyse_rank(read_chain(make_paper_network((3,)), (3, 32, 32)), prove=0).layers
    assert (first.virtual, second.virtual) == (0, -first.index) == (0, -405)


def test_cnn6_has_full_rank_and_cnn6_d_lacks_280_equations() -> None:
    full, deficient = report_of("cnn6"), report_of("cnn6_d")
    assert full.full
    assert not full.deficient_layers
    assert not deficient.full
    assert deficient.deficient_layers == (1,)
    second = deficient.layers[1]
    assert (second.unknowns, second.rank, second.missing) == (3468, 3188, 280)
    assert second.index < 0  # the paper's count finds enough equations
    assert deficient.critical == 1


def test_rank_of_cnn6_d_on_small_grey_images_is_proved() -> None:
    report = report_of("cnn6_d", (1, 28, 28), prove=3000)
    assert all(layer.proved for layer in report.layers)
    assert report.layers[1].rank == 2668 == report_of("cnn6_d", (1, 28, 28)).layers[1].rank
    assert report.locally_unique


def test_sigmoid_lenets_have_full_rank_for_32_pixels_but_not_for_128() -> None:
    for name in ("lenet_dlg", "lenet_cpl"):
        assert report_of(name, classes=10).full
        assert report_of(name, (3, 128, 128), classes=10).deficient_layers == (1,)


# the equations themselves


@pytest.fixture(scope="module")
def thirty() -> list[RandomNetwork]:
    return [make_random_network(seed) for seed in THIRTY]


@pytest.fixture(scope="module")
def numerical(thirty: list[RandomNetwork]) -> list[list[int]]:
    return [compute_numerical_ranks(network) for network in thirty]


def test_proved_ranks_of_random_networks_are_the_numerical_ones(thirty: list[RandomNetwork], numerical: list[list[int]]) -> None:
    for network, true in zip(thirty, numerical, strict=True):
        assert analyse_ranks(network, prove=3000) == true, network.words


def test_counted_rank_is_never_too_low_and_seldom_too_high(thirty: list[RandomNetwork], numerical: list[list[int]]) -> None:
    counted = [rank for network in thirty for rank in analyse_ranks(network, prove=0)]
    true = [rank for ranks in numerical for rank in ranks]
    assert all(count >= rank for count, rank in zip(counted, true, strict=True))
    assert sum(count == rank for count, rank in zip(counted, true, strict=True)) >= 0.9 * len(true)


def test_random_networks_are_of_every_kind(thirty: list[RandomNetwork]) -> None:
    reports = [analyse_rank(network.chain) for network in thirty]
    assert 8 <= sum(report.full for report in reports) <= 22
    assert any(report.deficient_layers and report.deficient_layers[0] > 0 for report in reports)
    assert any(layer.unknowns > layer.used for report in reports for layer in report.layers[1:])


def measure_attack_error(network: RandomNetwork) -> float:
    """Run R-GAP on float64 gradients, and return the MSE for the best solution of the last layer."""
    x = torch.randn(1, *network.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = dict(network.model.named_parameters())
    loss = nn.functional.cross_entropy(network.model(x), torch.tensor([0]))
    gradient = {key: g[None] for key, g in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)}
    stacked = {key: w.detach()[None] for key, w in weights.items()}
    rgap = RgapSettings(tolerance=1e-14, iterations=20_000)
    ends = [
        solve_layers(network.chain, stacked, gradient, p, rgap)
        for p in solve_last_layer(network.chain, stacked, gradient, "cross_entropy")
    ]
    return min(float((end.f.reshape(x.shape) - x).square().mean()) for end in ends)


def test_r_gap_is_exact_for_networks_of_full_rank_only(thirty: list[RandomNetwork]) -> None:
    for network in thirty:
        error = measure_attack_error(network)
        assert error < 1e-12 if analyse_rank(network.chain, prove=3000).full else error > 1e-4, network.words


def compute_jacobian(network: RandomNetwork) -> torch.Tensor:
    """Return the Jacobian of the gradient by the input, (weights, values), with rows of norm 1."""
    weights = {key: w.detach() for key, w in network.model.named_parameters()}

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(network.model, w, (x,)), torch.tensor([0]))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in grad(loss)(weights, x).values()])

    x = torch.randn(1, *network.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = jacfwd(gradient)(x).reshape(-1, x.numel())
    lengths = rows.norm(dim=1, keepdim=True)
    return torch.where(lengths > 1e-13 * lengths.max(), rows / lengths, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # in torch, of forward-mode derivatives
def test_count_near_the_input_is_the_rank_of_the_gradients_jacobian(thirty: list[RandomNetwork]) -> None:
    judged = [(network, analyse_rank(network.chain, prove=3000)) for network in thirty]
    judged = [(network, report) for network, report in judged if not report.full and report.layers[0].unknowns <= 220]
    assert len(judged) >= 6
    for network, report in judged:
        assert report.layers[0].near == compute_rank(compute_jacobian(network)), network.words


# what makes rows depend on others, by hand


def test_each_pair_of_output_channels_makes_one_row_dependent() -> None:
    layer = analyse_convolutions(nn.Conv2d(4, 3, 3), nn.Tanh(), shape=(4, 10, 10)).layers[0]
    assert layer.rank == 4 * 3 * 9 + 3 * 8 * 8 - 3 * 3
    assert layer.dependent == 3 * 3


def test_stride_limits_the_rank_of_each_group_of_taps() -> None:
    layer = analyse_convolutions(nn.Conv2d(12, 20, 3, 2, 1), nn.Tanh(), shape=(12, 17, 17), prove=0).layers[0]
    # of 17 x 17 values, 9 x 9 meet one tap, 8 x 8 meet four, and twice 9 x 8 meet two
    assert layer.rank == 12 * (min(20, 81) + min(80, 64) + 2 * min(40, 72)) + 20 * 81 - 20**2


def test_linear_layer_is_determined_unless_pooling_precedes_it() -> None:
    plain = analyse_convolutions(nn.Conv2d(2, 3, 3), nn.Tanh(), shape=(2, 8, 8))
    pooled = analyse_convolutions(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AvgPool2d(2), shape=(2, 8, 8))
    assert plain.layers[1].missing == 0
    assert (pooled.layers[1].unknowns, pooled.layers[1].rank) == (3 * 6 * 6, 3 * 3 * 3)


def test_values_that_a_stride_skips_are_unused() -> None:
    stepping = nn.Conv2d(3, 40, 2, 3)
    first = analyse_convolutions(stepping, nn.Tanh(), shape=(3, 8, 8))
    assert first.unused == 3 * (64 - 36)
    assert not first.deficient_layers
    assert not first.full
    assert not first.locally_unique
    further = analyse_convolutions(nn.Conv2d(1, 3, 1), nn.Tanh(), stepping, nn.Tanh(), shape=(1, 8, 8))
    assert further.layers[1].used == 3 * 36
    assert further.unused == 64 - 36  # the first layer uses them, but no logit depends on them
    assert not further.deficient_layers


def test_values_that_pooling_before_a_linear_layer_skips_are_unused() -> None:
    first = analyse_convolutions(nn.AvgPool2d(2), shape=(2, 5, 5))  # of 5 x 5 values, 4 x 4 are pooled to 2 x 2
    assert first.unused == 2 * (25 - 16)
    assert (first.layers[0].used, first.layers[0].missing) == (2 * 16, 2 * (16 - 4))
    further = analyse_convolutions(nn.Conv2d(2, 3, 4), nn.Tanh(), nn.AvgPool2d(2), shape=(2, 8, 8))
    assert (further.layers[1].used, further.layers[1].missing) == (3 * 16, 3 * (16 - 4))
    single = analyse_convolutions(nn.AvgPool2d(1, 2), shape=(2, 5, 5))  # picks 3 x 3 values
    assert not single.deficient_layers
    assert not single.full
    assert single.undetermined == single.unused == 2 * (25 - 9)


def test_used_values_are_those_with_a_derivative(thirty: list[RandomNetwork]) -> None:
    for network in thirty:
        inputs = []
        x = torch.rand(1, *network.shape, requires_grad=True)
        for layer in network.chain.layers:
            inputs.append(x)
            given = layer.apply_weight(apply_maps(layer.before, x), torch.rand(layer.shape))
            x = apply_maps(layer.after, given)
        reached = torch.autograd.grad(x.sum(), inputs)
        layers = analyse_rank(network.chain, prove=0).layers
        for mask, slopes, layer in zip(find_used_values(network.chain), reached, layers, strict=True):
            assert torch.equal(slopes[0] != 0, mask), network.words
            assert layer.used == int(mask.sum()), network.words


def test_zeros_of_a_relu_remove_constraints_and_most_relations() -> None:
    layers = nn.Conv2d(4, 3, 3, bias=False), nn.ReLU()
    half, none = (analyse_convolutions(*layers, shape=(4, 10, 10), dead=dead, prove=0).layers[0] for dead in (0.5, 0.0))
    assert none.rank == 108 + 192 - 9
    assert (half.known, half.rank) == (96, 108 + 96 - 3)
    assert not half.proved
    chain = read_chain(nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 3)), (4, 10, 10))
    rng = torch.Generator().manual_seed(0)
    alive = (torch.rand(3, 64, generator=rng).argsort(dim=1) < 32).double().reshape(1, 3, 8, 8)
    weight, k = (torch.randn(1, *shape, generator=rng, dtype=torch.float64) for shape in ((3, 4, 3, 3), (3, 8, 8)))
    system = LayerSystem(chain.layers[0], weight, k * alive)
    system.scale = EquationValues(alive, torch.ones(1, 1, 1, dtype=torch.float64))
    assert compute_rank(write_matrix(system)) == half.rank


# texts of the verdict


def test_verdict_states_equations_unknowns_and_undetermined_values() -> None:
    assert write_headline(report_of("cnn6")).startswith("yes, exactly")
    deficient = report_of("cnn6_d")
    assert write_headline(deficient).startswith("yes, by a search")
    words = " ".join(write_verdict(deficient))
    assert "Layer 2 of 7 has 3,188 independent equations for 3,468 unknowns: 280 are missing" in words
    assert "found by counting" in words
    lost = report_of("lenet_cpl", (3, 128, 128), classes=10)
    assert write_headline(lost).startswith("in part")
    assert f"leave {lost.undetermined:,} of the input's 49,152 values undetermined" in " ".join(write_verdict(lost))
    relu = analyse_convolutions(nn.Conv2d(1, 8, 3), nn.ReLU(), shape=(1, 8, 8), dead=0.25)
    assert any("25% of each ReLU's outputs are 0" in sentence for sentence in write_verdict(relu))


@pytest.mark.parametrize(("activation", "prove", "mark"), [(nn.ReLU(), 3000, "~"), (nn.ReLU(), 0, "≤"), (nn.Tanh(), 3000, "")])
def test_verdict_tells_ranks_that_depend_on_the_data_from_counted_ones(activation: nn.Module, prove: int, mark: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), activation, nn.Flatten(), nn.Linear(288, 3))
    chain = read_chain(model, (1, 8, 8))
    report = analyse_rank(chain, dead=0.25, prove=prove)
    words = " ".join(write_verdict(report))
    assert ("The rank of layer 1 depends on which pre-activations are negative" in words) == (mark == "~")
    assert ("The rank of layer 1 is an upper bound, found by counting" in words) == (mark == "≤")
    assert list(make_table(report, chain).columns[7].cells) == [f"{mark}64", "288"]


def test_convolution_as_the_last_layer_is_never_of_full_rank() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 6), nn.Flatten())
    report = analyse_rank(read_chain(model, (1, 6, 6)))
    assert not report.full
    assert "Its last layer is a convolution" in write_verdict(report)[0]


@pytest.mark.parametrize("dead", [-0.1, 1.0, float("nan")])
def test_share_of_zeros_out_of_range_is_refused(dead: float) -> None:
    with pytest.raises(ValueError, match=f"below 1, got {dead}"):
        analyse_convolutions(nn.Conv2d(1, 2, 3), nn.ReLU(), shape=(1, 8, 8), dead=dead)
