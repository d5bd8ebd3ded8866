"""Layers of a decoder that have experts, as ``--moe-layer-freq`` gives them.

Megatron-LM evaluates the value as Python. Here it is read as a number N, which gives experts to layers 0, N, 2 N, ..,
or sums and multiples of lists of 0 and 1, such as ([0]*3+[1]*58), with one number for each layer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from megapar.schema.legal_values import MAX_LAYERS

Pattern = tuple[int, ...]
"""1 for a layer with experts and 0 for a dense one, repeated if there are more layers; empty: all have experts."""

ALL = "1"  # all layers have experts
LONGEST = MAX_LAYERS  # elements of a list: an expression such as [1]*9*9*9.. must not fill the memory
_OTHER = re.compile(r"[^\d\s,+*()\[\]]|,\s*\]")  # no part of such an expression


def listed(text: str) -> Pattern | None:
    """Return the list that an expression of lists stands for, None for a number. Raises ValueError for other text."""
    value = listed_or_number(text)
    return None if isinstance(value, int) else value


def to_pattern(text: str) -> Pattern:
    """Return the pattern of a flag's value. Raises ValueError for a wrong one."""
    value = listed_or_number(text)
    if isinstance(value, int):
        value = (1, *(0,) * (value - 1))
    return () if all(value) else value


def pattern_or_all(text: str) -> Pattern:
    """Return the pattern of a flag's value; that of all layers for a wrong one, which another rule refuses."""
    try:
        return to_pattern(text)
    except ValueError:
        return ()


def to_text(pattern: Sequence[int]) -> str:
    """Return the shortest value of the flag that gives this pattern."""
    if all(pattern):
        return ALL
    if pattern[0] and not any(pattern[1:]):
        return str(len(pattern))
    return to_list_text(pattern)


def to_list_text(pattern: Sequence[int]) -> str:
    """Return the shortest expression of lists for this pattern."""
    runs: list[tuple[int, int]] = []
    for kind in pattern:
        runs[-1:] = [(kind, runs[-1][1] + 1)] if runs and runs[-1][0] == kind else [*runs[-1:], (kind, 1)]
    text = "+".join(f"[{kind}]*{count}" for kind, count in runs)
    for period in range(1, len(pattern) // 2 + 1):
        times, rest = divmod(len(pattern), period)
        if not rest and list(pattern) == list(pattern[:period]) * times:
            repeated = f"[{','.join(map(str, pattern[:period]))}]*{times}"
            return min(text, repeated, key=len)
    return min(text, f"[{','.join(map(str, pattern))}]", key=len)


def layers_of(pattern: Sequence[int], num_layers: int, first_k_dense: int = 0) -> tuple[int, ...]:
    """Return the numbers of the layers with experts."""
    return tuple(n for n in range(first_k_dense, num_layers) if not pattern or pattern[n % len(pattern)])


def flags_of(layers: Iterable[int], num_layers: int) -> tuple[int, str]:
    """Return the values of --first-k-dense and --moe-layer-freq that give experts to ``layers``."""
    with_experts = set(layers)
    first = min(with_experts, default=num_layers)
    if with_experts == set(range(first, num_layers)):
        return first, ALL
    return 0, to_text([int(n in with_experts) for n in range(num_layers)])


def ernie_interval(layers: Sequence[int]) -> int:
    """Return the ``moe_layer_interval`` of ERNIE 4.5 that gives experts to these layers, from the first to the last.

    0 if there is none; 1 for no layers.
    """
    if not layers:
        return 1
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    even = list(layers) == list(range(layers[0], layers[-1] + 1, step)) and (layers[0] + 1) % step == 0
    return step if even else 0


def listed_or_number(text: str) -> int | Pattern:
    """Return the number, or the list of 0 and 1, that an expression stands for. Raises ValueError for another text."""
    try:
        if _OTHER.search(text):
            raise SyntaxError
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{text[:20]!r} is not a number, or a list, sum or multiple of lists") from None
    if isinstance(value, int):
        if not 1 <= value <= LONGEST:
            raise ValueError(f"{value} is not 1 to {LONGEST}")
    elif not value:
        raise ValueError("a list of no layers")
    elif not set(value) <= {0, 1}:
        raise ValueError("a layer is 0 or 1")
    return value


def _value(node: ast.expr) -> int | Pattern:
    """Return the value of a number, a list of numbers, a sum or a product. Raises SyntaxError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List) and node.elts:
        numbers = [number for item in node.elts if isinstance(number := _value(item), int)]
        if len(numbers) == len(node.elts):
            return tuple(numbers)
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult)):
        raise SyntaxError
    left, right, times = _value(node.left), _value(node.right), isinstance(node.op, ast.Mult)
    if times and isinstance(left, tuple) and isinstance(right, tuple):
        raise ValueError("lists have no product")
    if not times and type(left) is not type(right):
        raise ValueError("a list and a number have no sum")
    length = _size(left) * _size(right) if times else _size(left) + _size(right)
    if length > LONGEST:
        raise ValueError(f"a list of {length} layers is too long")
    return left * right if times else left + right  # type: ignore[operator]


def _size(value: int | Pattern) -> int:
    return value if isinstance(value, int) else len(value)
