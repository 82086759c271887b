"""Lower bounds on the error of reconstructions, from the information that clients' messages hold on their examples."""

from attacker.bounds.cramer_rao import ErrorBound, bound_error
from attacker.bounds.declared_noise import find_declared_noise
from attacker.bounds.information import FisherInformation, NoisyMessage
from attacker.bounds.messages import NOISES, NotBounded, UsedExamples, build_message, flatten_update
from attacker.bounds.prior import GaussianPrior, fit_prior

__all__ = [
    "NOISES",
    "ErrorBound",
    "FisherInformation",
    "GaussianPrior",
    "NoisyMessage",
    "NotBounded",
    "UsedExamples",
    "bound_error",
    "build_message",
    "find_declared_noise",
    "fit_prior",
    "flatten_update",
]
