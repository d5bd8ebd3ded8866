"""Denominators: every term over its own items of the global batch, whatever the micro-batches."""

from __future__ import annotations

import pytest
import torch

from megapar.model.layers.loss import Terms
from megapar.training.step.objective import Objective


def terms(layers: int = 1, **changed: float) -> Terms:
    values = {"lm": 0.0, "mtp": 0.0, "aux": 0.0, "z": 0.0, "sequence": 0.0, "orthogonal": 0.0, **changed}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    sums = {name: tensors.pop(name) for name in ("lm", "mtp")}
    count = torch.zeros((), dtype=torch.int64)
    return Terms(sums, **tensors, load=count.new_zeros((layers, 2)), dropped=count)


OBJECTIVE = Objective({"lm": 1.0, "mtp": 0.3}, 0.01, 0.001, 0.1, 0.5)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_loss_of_the_weights_counts_once_per_step(steps: int) -> None:
    items = {"lm": 10, "mtp": 8, "sequences": 4}
    total = sum(float(OBJECTIVE.of(terms(orthogonal=2.0), items, steps)) for _ in range(steps))
    assert total == pytest.approx(0.5 * 2.0)


def test_every_term_has_its_own_denominator() -> None:
    items = {"lm": 10, "mtp": 8, "sequences": 4}
    loss = OBJECTIVE.of(terms(lm=20.0, mtp=16.0, aux=3.0, z=5.0, sequence=6.0, orthogonal=2.0), items, 2)
    assert float(loss) == pytest.approx(2.0 + 0.3 * 2.0 + 0.01 * 1.5 + 0.001 * 2.5 + 0.1 * 1.5 + 0.5 * 1.0)
    means = OBJECTIVE.routing_means((3.0, 5.0, 6.0, 2.0), items, 2)
    assert OBJECTIVE.weighted({"lm": 2.0, "mtp": 2.0}, means) == pytest.approx(float(loss))


def test_no_items_are_zero() -> None:
    items = {"lm": 10, "mtp": 0, "sequences": 4}
    assert float(OBJECTIVE.of(terms(), items, 1)) == 0.0


def test_what_has_no_weight_is_not_differentiated() -> None:
    routing = {name: torch.ones((), dtype=torch.float64, requires_grad=True) for name in ("aux", "z")}
    found = terms(lm=20.0)._replace(**routing)
    loss = Objective({"lm": 1.0, "mtp": 0.3}, aux_coefficient=0.5).of(found, {"lm": 10, "mtp": 8}, 2)
    loss.backward()
    assert (float(loss.detach()), routing["aux"].grad, routing["z"].grad) == (2.0 + 0.25, torch.tensor(0.25), None)


def test_a_model_without_experts_has_no_routing_losses() -> None:
    assert float(OBJECTIVE.of(terms(layers=0, lm=20.0), {"lm": 10, "mtp": 8}, 2)) == 2.0


def test_a_stage_without_a_head_has_only_routing_losses() -> None:
    assert float(OBJECTIVE.of(terms(z=4.0)._replace(sums={}), {"lm": 10}, 2)) == pytest.approx(0.001 * 2)
