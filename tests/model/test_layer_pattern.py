"""Which layers have experts: the expression is parsed as Megatron-LM evaluates it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megapar.model.decoder.layer_pattern import ALL, ernie_interval, flags_of, layers_of, listed, to_pattern, to_text
from tests.model.small import MOE

EXPRESSIONS = {
    "[1,0,1]": [1, 0, 1],
    "([0]*3+[1]*58)": [0] * 3 + [1] * 58,
    "[0]*1+[1]*2+[0]": [0, 1, 1, 0],
    "([1,0]*4)": [1, 0] * 4,
    "3*[1,0]": [1, 0, 1, 0, 1, 0],
    "(([0]*2+[1])*3)*1": [0, 0, 1] * 3,
    "[0,1]*2*2": [0, 1] * 4,
    "[1]*(2+1)": [1, 1, 1],
    " [0, 1] + [1] ": [0, 1, 1],
    "[0]*0+[1]": [1],
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_lists_are_those_of_python(text: str) -> None:
    assert listed(text) == tuple(EXPRESSIONS[text])


@pytest.mark.parametrize(("text", "step"), [("1", 1), ("2", 2), ("(3)", 3), ("1+3", 4), ("2*3", 6)])
def test_a_number_gives_experts_to_every_nth_layer_as_megatron_does(text: str, step: int) -> None:
    assert listed(text) is None
    assert layers_of(to_pattern(text), 5) == tuple(layer for layer in range(5) if layer % step == 0)


def test_leading_dense_layers_beside_a_number_are_those_of_deepseek() -> None:
    """Its first classes: layer >= first_k_dense_replace and layer % moe_layer_freq == 0."""
    assert layers_of(to_pattern("2"), 7, 3) == tuple(n for n in range(7) if n >= 3 and n % 2 == 0)
    assert layers_of(to_pattern("1"), 7, 3) == (3, 4, 5, 6)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "[", "[1", "[2]", "[1]*[1]", "[1]+1", "0", "-1", "1.5", "1 2", "()", "[]", "[1,]", "[[1]]", "[1])"),
        *("[1]*999999999*999999999", "9*9*9*9*9*9", "(" * 300 + "1" + ")" * 300, "[0]**2", "__import__('os')"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        to_pattern(text)


def test_the_text_of_a_pattern_gives_it_again() -> None:
    draws = random.Random(0)
    for _ in range(300):
        count = draws.randint(1, 12)
        held = [n for n in range(count) if draws.random() < 0.6]
        pattern = [int(n in held) for n in range(count)]
        assert layers_of(to_pattern(to_text(pattern)), count) == tuple(held)
        if held:
            first, text = flags_of(held, count)
            assert layers_of(to_pattern(text), count, first) == tuple(held)
            assert not (first and text != ALL)
    assert to_text([0] * 3 + [1] * 58) == "[0]*3+[1]*58"
    assert to_text([1, 0] * 12) == "[1,0]*12"
    assert to_text([1, 0, 0]) == "3"
    assert flags_of(range(3, 61), 61) == (3, ALL)


def test_the_interval_of_ernie_4_5() -> None:
    """Layer n has experts if (n + 1) is a multiple of the interval, from the first to the last one."""
    assert ernie_interval([1, 3, 5]) == 2
    assert ernie_interval([2, 3, 4]) == 1
    assert ernie_interval([5]) == 1
    assert ernie_interval([0, 2, 4]) == ernie_interval([1, 2, 4]) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"first_k_dense": 1}, {"first_k_dense": 0, "moe_pattern": to_pattern("[0]+[1]*3")}),
        ({"first_k_dense": 0, "moe_pattern": to_pattern("2")}, {"first_k_dense": 0, "moe_pattern": (1, 0, 1, 0)}),
        ({"first_k_dense": 0}, {"first_k_dense": 0, "moe_pattern": to_pattern("[1]*4")}),
    ],
)
def test_a_checkpoint_is_of_the_same_model_however_its_layers_are_spelled(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = (replace(MOE, num_layers=4, **spelled) for spelled in (one, other))
    assert first.moe_layers == second.moe_layers
    assert first.facts() == second.facts()
    assert type(first).from_facts(first.facts()).moe_layers == first.moe_layers


def test_a_width_belongs_to_its_layer_with_experts() -> None:
    sizes = replace(MOE, num_layers=4, first_k_dense=0, moe_pattern=(0, 1, 0, 1), moe_widths=(16, 8))
    widths = [None if moe is None else moe.ffn_hidden_size for moe in map(sizes.moe_at, range(4))]
    assert widths == [None, 16, None, 8]
    assert sizes.layer_names[1:-1] == tuple(f"DecoderBlock({kind})" for kind in ("Mlp", "MoeLayer") * 2)
