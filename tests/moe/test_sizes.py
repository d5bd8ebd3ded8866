import pytest

from megapar.moe.sizes import MoeSizes


def sizes(**changes):
    return MoeSizes(**{"hidden_size": 8, "ffn_hidden_size": 16, "num_experts": 4, "topk": 2, **changes})


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "factor", "least", "capacity"),
    [
        (100, 4, 2, 1.0, 4, 50),
        (101, 4, 1, 1.0, 4, 26),
        (10, 1, 1, 1.1, 4, 11),  # 10 * 1.1 is a little more than 11 in binary
        (30, 10, 1, 1.1, 0, 4),
        (8, 8, 1, 1.0, 4, 4),
        (0, 4, 2, 1.0, 4, 4),
        (0, 4, 2, 1.0, 0, 0),
    ],
)
def test_capacity(tokens, experts, topk, factor, least, capacity):
    made = sizes(num_experts=experts, topk=topk, capacity_factor=factor, min_capacity=least)
    assert made.capacity(tokens) == capacity


@pytest.mark.parametrize(
    "changes",
    [{"kind": "tutel"}, {"drop_policy": "last"}, {"activation": "relu"}, {"topk": 5}, {"topk": 0}],
)
def test_wrong_values_are_refused(changes):
    value = next(iter(changes.values()))
    with pytest.raises(ValueError, match=str(value)):
        sizes(**changes)


def test_shared_width():
    assert sizes(shared_experts=3).shared_width == 48
    assert sizes().shared_width == 0
