"""Tests of the ROG benchmark: a stored answer is used only for the settings and images that it was made from."""

from dataclasses import replace
from pathlib import Path

import torch
from support.contract import Options
from support.rog.columns import BatchSetting, DefendedColumn, observe
from support.rog.outcomes import AnswerFolder

from attacker.attacks import cpl

ASKED = Options(quick=True, json=False, data=None, device="cpu", seed=0, table=None)
SETTING = BatchSetting(model="lenet_dlg", side=8, epochs=1)


def test_answers_are_stored_by_settings_and_images_and_not_by_the_name_of_a_column(tmp_path: Path) -> None:
    folder, images, y = AnswerFolder(tmp_path, fresh=False), torch.rand(2, 1, 1, 8, 8), torch.tensor([3])
    plain, attack = DefendedColumn("any"), cpl(steps=1)
    trials = [
        (plain, SETTING, images[0], attack),
        (replace(plain, name="other"), SETTING, images[0], cpl(steps=1)),  # the same work
        (replace(plain, defense="sign()"), SETTING, images[0], attack),
        (plain, replace(SETTING, learning_rate=1e-3), images[0], attack),
        (plain, SETTING, images[1], attack),
        (plain, SETTING, images[0], cpl(steps=1, patience=7)),
        (plain, SETTING, images[0], attack.null()),
    ]
    counts = []
    for column, setting, x, chosen in trials:
        folder.attack(chosen, observe(column, setting, x, y, key="client", seed=0), x, ASKED)
        counts.append(len(list(tmp_path.glob("*.safetensors"))))
    assert counts == [1, 1, 2, 3, 4, 5, 6]
