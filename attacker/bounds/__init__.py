"""Lower bounds on the error of reconstructions, from the information that clients' messages hold on their examples."""

from attacker.bounds.cramer_rao import ErrorBound, bound_error
from attacker.bounds.declared_noise import find_declared_noise
from attacker.bounds.information import FisherInformation, NoisyMessage
from attacker.bounds.messages import NotBounded, UsedExamples, build_message
from attacker.bounds.prior import GaussianPrior, fit_prior
from attacker.bounds.two_layer import TwoLayerRates, compute_two_layer_rates

__all__ = [
    "ErrorBound",
    "FisherInformation",
    "GaussianPrior",
    "NoisyMessage",
    "NotBounded",
    "TwoLayerRates",
    "UsedExamples",
    "bound_error",
    "build_message",
    "compute_two_layer_rates",
    "find_declared_noise",
    "fit_prior",
]
