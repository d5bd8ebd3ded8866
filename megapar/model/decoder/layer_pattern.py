"""Layers of a decoder that have experts, as ``--moe-layer-freq`` gives them.

Megatron-LM evaluates the value as Python. Here it is parsed: a number N, which gives experts to layers 0, N, 2 N, ..,
or sums and multiples of lists of 0 and 1, such as ([0]*3+[1]*58), with one number for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megapar.schema.legal_values import MAX_LAYERS

Pattern = tuple[int, ...]
"""1 for a layer with experts and 0 for a dense one, repeated if there are more layers; empty: all have experts."""

ALL = "1"  # all layers have experts
LONGEST = MAX_LAYERS  # elements of a list: an expression such as [1]*9*9*9.. must not fill the memory
_TOKEN = re.compile(r"\s*(\d+|[][()+*,])")


def listed(text: str) -> Pattern | None:
    """Return the list that an expression of lists stands for; None for a number.

    Raises ValueError if the text is neither.
    """
    found = _evaluated(text)
    return None if isinstance(found, int) else found


def to_pattern(text: str) -> Pattern:
    """Return the pattern of a flag's value. Raises ValueError for a wrong one."""
    found = _evaluated(text)
    if isinstance(found, int):
        found = (1, *(0,) * (found - 1))
    return () if all(found) else found


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
    held = set(layers)
    first = min(held, default=num_layers)
    if held == set(range(first, num_layers)):
        return first, ALL
    return 0, to_text([int(n in held) for n in range(num_layers)])


def ernie_interval(layers: Sequence[int]) -> int:
    """Return the ``moe_layer_interval`` of ERNIE 4.5 that gives experts to these layers, from the first to the last.

    0 if there is none; 1 for no layers.
    """
    if not layers:
        return 1
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    even = list(layers) == list(range(layers[0], layers[-1] + 1, step)) and (layers[0] + 1) % step == 0
    return step if even else 0


def _evaluated(text: str) -> int | Pattern:
    found = _Expression(text).value()
    if isinstance(found, int):
        if not 1 <= found <= LONGEST:
            raise ValueError(f"{found} is not 1 to {LONGEST}")
    elif not set(found) <= {0, 1}:
        raise ValueError("a layer is 0 (dense) or 1 (experts)")
    return found


class _Expression:
    """A recursive descent over ``sum = product (+ product)*``, ``product = value (* value)*``.

    A value is a number, a list of numbers, or a sum in parentheses.
    """

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None or len(self._tokens) > LONGEST:
                raise ValueError(f"{text[at : at + 20]!r} is not a number, or a list, sum or multiple of lists")
            self._tokens.append(found[1])
            at = found.end()

    def value(self) -> int | Pattern:
        result = self._sum(0)
        if self._tokens:
            raise ValueError(f"{self._tokens[0]!r} is too much")
        return result

    def _next(self, wanted: str = "") -> str:
        if not self._tokens:
            raise ValueError("it ends too early")
        token = self._tokens.pop(0)
        if wanted and token != wanted:
            raise ValueError(f"{wanted!r} is missing before {token!r}")
        return token

    def _sum(self, depth: int) -> int | Pattern:
        total = self._product(depth)
        while self._tokens[:1] == ["+"]:
            self._next()
            more = self._product(depth)
            if isinstance(total, tuple) and isinstance(more, tuple):
                _check_length(len(total) + len(more))
                total += more
            elif isinstance(total, int) and isinstance(more, int):
                total += more
            else:
                raise ValueError("a list and a number have no sum")
        return total

    def _product(self, depth: int) -> int | Pattern:
        result = self._value(depth)
        while self._tokens[:1] == ["*"]:
            self._next()
            more = self._value(depth)
            if isinstance(result, tuple) and isinstance(more, tuple):
                raise ValueError("lists have no product")
            _check_length(_size(result) * _size(more))
            result = more * result if isinstance(result, int) else result * _size(more)
        return result

    def _value(self, depth: int) -> int | Pattern:
        token = self._next()
        if token.isdigit():
            return int(token[:9])
        if token == "(" and depth < 20:
            inside = self._sum(depth + 1)
            self._next(")")
            return inside
        if token != "[":
            raise ValueError(f"{token!r} does not begin a number or a list")
        numbers = [self._number()]
        while self._next_is(","):
            numbers.append(self._number())
        self._next("]")
        return tuple(numbers)

    def _number(self) -> int:
        token = self._next()
        if not token.isdigit():
            raise ValueError(f"a list contains numbers, not {token!r}")
        return int(token[:9])

    def _next_is(self, token: str) -> bool:
        if self._tokens[:1] == [token]:
            self._next()
            return True
        return False


def _size(value: int | Pattern) -> int:
    return value if isinstance(value, int) else len(value)


def _check_length(length: int) -> None:
    if length > LONGEST:
        raise ValueError(f"a list of {length} layers is too long")
