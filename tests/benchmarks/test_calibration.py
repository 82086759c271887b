"""Test of the list of nulls that calibration.py runs."""

from support.calibration.nulls import list_specs

from attacker.attacks import ATTACKS


def test_calibration_includes_a_null_of_every_attack() -> None:
    specs = list(list_specs())
    assert {spec.name for spec in specs} == set(ATTACKS)
    assert all(spec.null and spec.build() is not None for spec in specs)
