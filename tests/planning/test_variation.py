"""A variation is refused or resolved exactly as the command line with the same flags is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megapar.arguments import Config, parse
from megapar.errors import ConfigError
from megapar.planning.devices import device_kind
from megapar.planning.knobs import DROPPED, KNOBS, Candidate, Scope, default
from megapar.planning.variation import MISSING, Variations, command_line

CONFIGS = Path(__file__).parents[2] / "configs"


def walk(varied: Variations, scope: Scope, count: int) -> list[Candidate]:
    """Return candidates on a random walk over the knobs, and the refused ones beside it."""
    drawn, now = random.Random(5), Candidate.of({"micro_batch_size": 1})
    found: list[Candidate] = []
    while len(found) < count:
        others = list(drawn.choice(KNOBS).others(now, scope))
        if others:
            found.append(drawn.choice(others))
            now = found[-1] if isinstance(varied.attempt(found[-1].flags()), Config) else now
    return found


def parsed(kind: str, line: list[str]) -> Config | set[str]:
    """Return the configuration of a command line, or the rules that refuse it."""
    try:
        return parse(kind, line, {})
    except ConfigError as error:
        return {one.rule for one in error.complaints}


@pytest.mark.parametrize(("name", "kind"), [("mixtral-8x7b", "moe"), ("moonlight-16b-a3b", "moe")])
def test_a_variation_is_what_the_command_line_says(name: str, kind: str) -> None:
    line = ["--config", str(CONFIGS / f"{name}.yaml"), "--global-batch-size", "64"]
    varied = Variations(kind, line, 16, free=DROPPED)
    one_rank = command_line({**{name: default(name) for name in DROPPED}, "world_size": 1, "micro_batch_size": 1})
    sizes = parse(kind, [*line, *one_rank, "--rules-only"], {}).model
    scope = Scope(kind, sizes, 16, device_kind("h100-80g").node, 64, latent=True)
    legal = refused = 0
    for candidate in walk(varied, scope, 100):
        flags = candidate.flags()
        more = command_line(varied.unstated(flags))
        said, config = parsed(kind, [*line, *more, "--rules-only", "--world-size", "16"]), varied.attempt(flags)
        if isinstance(said, set):
            assert isinstance(config, list)
            assert said <= {one.rule for one in config}
            refused += 1
            continue
        if said.notes or any(origin.startswith("switched off") for origin in said.origins.values()):
            assert isinstance(config, list)  # could not start, or is the same without a flag
            continue
        assert isinstance(config, Config), config
        assert config.to_dict() == said.to_dict()
        assert config.grid == said.grid
        legal += 1
    assert legal > 10
    assert refused > 10


def test_values_of_a_file_are_dropped_and_those_of_the_line_are_kept() -> None:
    line = ["--config", str(CONFIGS / "mixtral-8x7b.yaml"), "--global-batch-size", "64", "--mp-degree", "2"]
    varied = Variations("moe", line, 16, free=DROPPED)
    assert varied.fixed("mp_degree") == 2
    assert varied.fixed("ep_degree") is MISSING
    assert varied.setting("ep_degree") == 1
    assert varied.unstated({})["ep_degree"] == 1
    assert "ep_degree" not in Variations("moe", line, 16).unstated({})


def test_a_line_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        Variations("moe", ["--no-such-flag", "1"], 2)
