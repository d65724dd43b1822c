# SPDX-License-Identifier: Apache-2.0
"""The table of the Trainer's arguments: what a row names is there, and calls take their arguments by it."""

import inspect

import pytest
from torch import nn

from lamina.composer.arguments import _RULES, _RULES_OF_FIT, Arguments
from lamina.composer.evaluator import Evaluator
from lamina.trainer import ComposerClassifier, Trainer


def test_each_argument_of_fit_has_a_row():
    assert set(inspect.signature(Trainer.fit).parameters) - {"self"} <= _RULES_OF_FIT.keys()


@pytest.mark.parametrize("name", _RULES)
def test_what_a_row_names_is_there(name):
    row, own = _RULES[name], Evaluator(label="a", dataloader=[])
    assert set(row.beside) <= _RULES.keys() - {name}
    assert not row.of_each or hasattr(own, row.of_each)
    assert not (row.refusal and row.read), "what is refused is not read"


def test_a_refused_argument_says_so_alone():
    model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
    with pytest.raises(ValueError) as caught:
        Arguments.of({"model": model, "spin_dataloaders": "no"})
    said = "spin_dataloaders: there is none here: a training goes on with its next batch in any case"
    assert str(caught.value) == f"Trainer: {said}"
