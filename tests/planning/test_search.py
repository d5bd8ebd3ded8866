"""``megapar plan --search``: legal, fitting, fastest first, neighbours with their reasons; knobs and variations."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megapar.arguments import FLAGS, Config, parse, resolved_values
from megapar.config.yaml_file import load_pairs
from megapar.errors import ConfigError
from megapar.planning.devices import device_kind
from megapar.planning.knobs import (
    DROPPED,
    KNOBS,
    MICRO_BATCH,
    RANK_ORDERS,
    RECOMPUTE,
    SCHEDULE,
    TRIED_FLAGS,
    Candidate,
    Scope,
    default,
)
from megapar.planning.plan import Plan
from megapar.planning.search import ALIKE, _parts, _slower
from megapar.planning.speed import Speed
from megapar.planning.variation import MISSING, Variations, command_line
from megapar.tools.main import main
from tests.support.pace import usual_seconds

CONFIGS = Path(__file__).parents[2] / "configs"


@functools.cache
def search(*flags: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["plan", "--search", "--json", *flags]) == 0
    return json.loads(said.getvalue())


MIXTRAL = ("--config", str(CONFIGS / "mixtral-8x7b.yaml"), "--num-layers", "4")
LONG = (
    *("--num-experts", "0", "--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8"),
    *("--num-query-groups", "2", "--seq-length", "16384", "--dtype", "bf16"),
)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any] | None:
    """Return the plan of these flags, or None if they are refused."""
    status = main(["plan", "--json", *flags])
    said = capsys.readouterr().out
    return None if status == 2 else json.loads(said)


def pasted(command: str) -> list[str]:
    """Return the trainer's flags of a command."""
    words = shlex.split(command)
    return words[words.index("pretrain_moe.py") + 1 :]


def test_the_best_layouts_are_legal_fit_and_come_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = search(*MIXTRAL, "--world-size", "8")
    seconds = [plan["step_seconds"] for plan in found["best"]]
    assert seconds[1:] == sorted(seconds[1:])
    assert seconds[0] <= min(seconds) * ALIKE
    assert all(plan["fits"] for plan in found["best"])
    of_file = plan(capsys, *MIXTRAL, "--world-size", "8", "--ep-degree", "2")
    assert of_file["step_seconds"] > seconds[0]


@pytest.mark.parametrize(("flags", "world"), [(MIXTRAL, 8), ((*LONG, "--global-batch-size", "4"), 16)])
def test_the_command_gives_the_same_plan(
    flags: tuple[str, ...], world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = search(*flags, "--world-size", str(world))
    assert found["command"].startswith("megapar launch --nproc-per-node 8 ")
    assert ("--nnodes 2 --node-rank $NODE " in found["command"]) == (world == 16)
    again = plan(capsys, *pasted(found["command"]), "--world-size", str(world))
    best = found["best"][0]
    assert again == {name: value for name, value in best.items() if name != "flags"}


def test_of_layouts_that_are_as_fast_the_plainest_comes_first() -> None:
    found = search(*SLICED, "--world-size", "8")
    alike = [plan for plan in found["best"] if plan["step_seconds"] <= found["best"][0]["step_seconds"] * ALIKE]
    assert len(found["best"][0]["flags"]) == min(len(plan["flags"]) for plan in alike)
    assert any(len(plan["flags"]) > len(found["best"][0]["flags"]) for plan in alike)


def test_flags_of_the_line_are_kept() -> None:
    kept = ("--mp-degree", "2", "--recompute-interval", "1")
    found = search(*LONG, *kept, "--world-size", "8", "--global-batch-size", "4")
    assert {plan["layout"]["mp"] for plan in found["best"]} == {2}
    assert {plan["flags"]["recompute_interval"] for plan in found["best"]} == {1}
    assert not {name for changed in found["neighbours"] for name in changed.split()} & {"--mp-degree", kept[2]}


def single_changes(best: dict[str, Any]) -> Iterator[list[str]]:
    """Yield command lines that set one flag of a search to another value, whatever the others are."""
    numbers = {"segment_broadcast_mb": (8.0, 128.0), "sharding_prefetch_segments": (0, 1, 3, 4)}
    words = {"rank_order": RANK_ORDERS, "pp_seg_method": ("uniform", "balanced"), "ampipe_degree": (1, 2, 3, 4)}
    for name in TRIED_FLAGS:
        flag = FLAGS[name]
        listed = (True, False) if flag.type == "bool" else flag.choices
        for value in words.get(name) or numbers.get(name) or listed or (-1, 1, 2, 3, 4, 5, 6, 7, 8):
            if value != best.get(name):
                yield command_line({name: value})


TINY = ("--config", str(CONFIGS / "tiny.yaml"), "--global-batch-size", "16")
SLICED = (*MIXTRAL, "--moe-model-type", "deepspeed_moe", "--global-batch-size", "64")


@pytest.mark.parametrize(
    ("flags", "world", "kind"),
    [((*LONG, "--global-batch-size", "4"), 8, "h100-80g"), (TINY, 4, "cpu"), (SLICED, 8, "h100-80g")],
)
def test_no_single_flag_makes_the_best_faster(flags: tuple[str, ...], world: int, kind: str) -> None:
    found = search(*flags, "--world-size", str(world), "--device-kind", kind)
    best, tried = found["best"][0], 0
    for change in single_changes(best["flags"]):
        line = [*pasted(found["command"]), "--rules-only", "--world-size", str(world), *change]
        try:
            other = Plan(parse("moe", line, {}), device_kind(kind))
            seconds = other.speed.step_seconds
        except ConfigError:
            continue
        tried += 1
        slower = seconds >= best["step_seconds"] / ALIKE  # the first is the plainest
        assert slower or other.tokens_per_step != best["tokens_per_step"] or not other.fits, change
    assert tried > 10


def test_every_neighbour_has_its_reason() -> None:
    found = search(*MIXTRAL, "--world-size", "8")
    assert len(found["neighbours"]) >= 40
    for why in found["neighbours"].values():
        assert "slower" in why or "GiB more" in why or why.startswith("[") or why == "as fast"
    assert not any(why.startswith("-") for why in found["neighbours"].values())


def test_a_neighbour_without_a_flag_of_the_best_says_so() -> None:
    found = search(*MIXTRAL, "--mp-degree", "2", "--sequence-parallel", "--world-size", "8")
    assert found["best"][0]["flags"]["expert_mp_degree"] == 1
    assert "without --expert-mp-degree" in found["neighbours"]
    assert not any("None" in words for words in found["neighbours"])


def test_layouts_that_do_not_allow_an_assumed_technique_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--config", str(CONFIGS / "tiny.yaml"), "--assume", "dualpipe")
    assert {plan["layout"]["pp"] for plan in search(*flags, "--world-size", "2")["best"]} == {2}
    assert main(["plan", "--search", *flags, "--world-size", "1"]) == 2
    assert "no layout is legal: [assume] --assume dualpipe: one stage" in capsys.readouterr().out


def test_long_sequences_are_shared_by_either_algorithm() -> None:
    found = search(*LONG, "--world-size", "8", "--global-batch-size", "2")
    best = found["best"][0]
    assert best["layout"]["cp"] * best["layout"]["mp"] * best["layout"]["pp"] >= 4  # two sequences on eight ranks
    algorithms = {plan["flags"].get("context_parallel_algo") for plan in found["best"]}
    assert algorithms & {"megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo"}
    assert any("--cp-degree" in changed for changed in found["neighbours"])


def test_ten_thousand_ranks_take_seconds() -> None:
    flags = ("--world-size", "10240", "--global-batch-size", "5120")
    with usual_seconds() as seconds:
        found = search("--config", str(CONFIGS / "megatron-h100-177b.yaml"), *flags)
    assert found["best"]
    assert seconds.taken < 20, "what is promised for 10,240 devices"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--mp-degree", "3"), "world-size"),
        (("--ep-degree", "8"), "ep-room"),
        (("--pp-degree", "2", "--sharding-stage", "3"), "pipeline-stage-3"),
        (("--recompute-in-advance",), "recompute-advance-chunks"),
    ],
)
def test_flags_without_a_legal_layout_are_refused(
    flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ((), ("--json",)):
        assert main(["plan", "--search", *form, *TINY, "--world-size", "4", *flags]) == 2
    said = capsys.readouterr()
    assert f"no layout is legal: [{reason}]" in said.out or f"[{reason}]" in said.err


def test_a_model_that_fits_nowhere_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-experts", "0", "--num-layers", "99", "--hidden-size", "16384", "--num-attention-heads", "128")
    assert main(["plan", "--search", *flags, "--world-size", "2", "--global-batch-size", "2"]) == 3
    said = capsys.readouterr().out
    assert "no layout fits" in said
    assert "GiB more than the 80.0 GiB" in said


def test_a_batch_that_no_layout_can_share_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--world-size", "1024", "--global-batch-size", "24")
    assert main(["plan", "--search", *flags]) == 2
    said = capsys.readouterr().err
    assert "no layout of 1,024 ranks can share a global batch of 24" in said
    assert "a multiple of 256" in said


def test_without_a_batch_there_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--search", "--num-experts", "0", "--world-size", "8"]) == 2
    assert "--global-batch-size" in capsys.readouterr().err


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


def scope(**changes: Any) -> Scope:
    sizes = parse("moe", ["--num-layers", "12", "--num-experts", "8", "--seq-length", "4096"], {}).model
    return replace(Scope("moe", sizes, 16, 8, 64, latent=False), **changes)


def values(knob: Any, name: str, candidate: Candidate) -> list[Any]:
    return [other.get(name) for other in knob.others(candidate, scope())]


def test_a_flag_without_effect_is_dropped_with_the_one_that_it_needs() -> None:
    layout = Candidate.of({"mp_degree": 2, "sequence_parallel": True, "expert_mp_degree": 1, "pp_schedule": "gpipe"})
    assert layout.flags() == {"mp_degree": 2, "sequence_parallel": True, "expert_mp_degree": 1}
    assert layout.but({"mp_degree": 1}).flags() == {}
    sliced = Candidate.of({"ep_degree": 2, "ampipe_degree": 2, "ampipe_cross_layer": True})
    assert sliced.but({"ep_degree": 1}) == Candidate()
    assert Candidate.of({"recompute_offload": True}) == Candidate()


def test_differences_name_the_values_to_change() -> None:
    one, other = Candidate.of({"mp_degree": 2}), Candidate.of({"mp_degree": 2, "ep_degree": 4})
    assert one.differences(other) == {"ep_degree": 1}
    assert other.differences(one) == {"ep_degree": 4}
    assert command_line({"ep_degree": 4, "hybrid_dp": False, "recompute_method": None}) == [
        *("--ep-degree", "4", "--no-hybrid-dp", "--recompute-method", "None")
    ]


def test_other_values_are_those_that_the_ranks_allow() -> None:
    assert values(MICRO_BATCH, "micro_batch_size", Candidate()) == [1, 2]  # 4 samples on each of 16 ranks
    staged = Candidate.of({"pp_degree": 4})
    assert values(MICRO_BATCH, "micro_batch_size", staged) == [1, 2, 8, 16]
    assert values(SCHEDULE, "vpp_degree", Candidate()) == []
    assert values(SCHEDULE, "vpp_degree", staged) == [1, 2, 3, 1, 2]  # gpipe, interleaved twice, zero bubble twice


def test_numbers_of_recomputed_layers_include_the_neighbours() -> None:
    now = Candidate.of({"recompute_method": "block", "recompute_num_layers": 6})
    counts = values(RECOMPUTE, "recompute_num_layers", now)
    assert {5, 7} <= set(counts)
    assert 6 not in counts


def test_a_trainer_has_no_knobs_of_the_other() -> None:
    offered = [knob for knob in KNOBS if any(knob.others(Candidate.of({"mp_degree": 2}), scope(kind="ernie")))]
    assert offered
    assert not any("ep_degree" in knob.flags or "ampipe_degree" in knob.flags for knob in offered)


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ("fill_seconds", "the bubble takes 1.5 s, not 0.5"),
        ("exposed_seconds", "exposed communication takes 1.3 s, not 0.3"),
        ("optimizer_seconds", "the optimizer takes 1.25 s, not 0.25"),
        ("step_seconds", "products and other operators take 9.95 s, not 8.95"),
    ],
)
def test_the_part_that_grew_is_named(field: str, word: str) -> None:
    fast = Speed(10.0, 0.1, 0.3, 0.25, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.5, 1.0)
    slow = replace(fast, step_seconds=11.0, **({} if field == "step_seconds" else {field: getattr(fast, field) + 1}))
    plans = [cast("Plan", SimpleNamespace(speed=speed)) for speed in (slow, fast)]
    assert _slower(*plans) == word
    assert sum(_parts(slow).values()) == pytest.approx(11.0)


def test_flags_of_the_line_are_kept_by_the_forms_that_save_memory_too() -> None:
    line = ("--config", "llama-3-8b", "--world-size", "8", "--global-batch-size", "8", "--device-kind", "a10-24g")
    fixed = ("--sharding-stage", "1", "--recompute-interval", "0")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["plan", "--search", "--json", *line, *fixed])
    for layout in json.loads(said.getvalue())["best"]:
        assert layout["flags"].get("sharding_stage", 1) == 1
        assert layout["flags"].get("recompute_interval", 0) == 0


def test_a_written_layout_has_the_flags_of_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, line = str(tmp_path / "f.yaml"), ("--config", "tiny", "--global-batch-size", "32")
    assert main(["plan", *line, "--world-size", "4", "--mp-degree", "2", "--search", "--write", file]) == 0
    capsys.readouterr()
    assert main(["plan", *line[:2], "--config", file, *line[2:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["mp"] == 2


def test_a_written_layout_unsets_what_a_file_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, own = tmp_path / "f.yaml", tmp_path / "own.yaml"
    own.write_text("recompute_interval: 1\nrecompute_method: block\nrecompute_num_layers: 1\n", encoding="utf-8")
    line = ("--config", "tiny", "--config", str(own), "--global-batch-size", "32", "--world-size", "4")
    assert main(["plan", *line, "--search", "--json", "--write", str(file)]) == 0
    command = shlex.split(json.loads(capsys.readouterr().out)["command"])
    settings = dict(load_pairs(file.read_text(encoding="utf-8")))
    unset = [flag for flag, value in itertools.pairwise(command) if value == "None"]
    assert unset == ["--" + name.replace("_", "-") for name, value in settings.items() if value is None]
    assert "--recompute-method" in unset


@pytest.mark.parametrize(
    ("world", "flags", "start"),
    [
        (12, (), "--nproc-per-node 6 --nnodes 2 "),
        (8, ("--ranks-per-node", "2"), "--nproc-per-node 2 --nnodes 4 "),
        (64, (), "--nproc-per-node 8 --nnodes 8 "),
        (4, ("--device-kind", "cpu"), "--nproc-per-node 4 pretrain_moe.py "),
    ],
)
def test_the_command_starts_the_ranks_of_the_layout(world: int, flags: tuple[str, ...], start: str) -> None:
    found = search("--config", "tiny", "--world-size", str(world), "--global-batch-size", str(2 * world), *flags)
    assert found["command"].startswith(f"megapar launch {start}")


def test_a_search_counts_the_days_of_its_budget() -> None:
    line = ("--config", "tiny", "--world-size", "2", "--global-batch-size", "4")
    assert search(*line, "--token-budget", "1e9")["best"][0]["token_budget"] == 1e9


def test_every_switch_is_written_so_that_it_is_read() -> None:
    for flag in FLAGS.values():
        for value in (True, False) if flag.type == "bool" and not flag.meta else ():
            words = [*command_line({flag.name: value}), "--rules-only"]
            assert resolved_values(flag.models[0], words, {})["requested"].get(flag.name) is value
