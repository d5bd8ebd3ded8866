"""``megapar plan``: what it says, how fast, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.model.spec import parameter_counts
from megapar.planning.assume import NO_FORMULA
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.tools.main import main
from megapar.tools.plan import DOES_NOT_FIT

CONFIGS = Path(__file__).parents[2] / "configs"


MOE = (
    *("--num-layers", "4", "--hidden-size", "2048", "--num-attention-heads", "16", "--seq-length", "4096"),
    *("--num-experts", "64", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "1024", "--vocab-size", "5000"),
    *("--data-path", "mock", "--global-batch-size", "64"),
)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    status = main(["plan", "--json", *flags])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if found["fits"] else DOES_NOT_FIT)
    return found


def test_the_object_has_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--config", str(CONFIGS / "mixtral-8x7b.yaml"))
    assert found["fits"] is True
    assert found["world_size"] == 64
    assert 46.6e9 < found["parameters"] < 46.8e9
    assert 12.8e9 < found["active_parameters"] < 13.0e9
    assert found["bubble_share"] == pytest.approx(3 / 19, abs=0.05)
    assert len(found["memory_bytes"]) == 4
    for stage in found["memory_bytes"]:
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
        assert all(stage[part] > 0 for part in parts)
        assert stage["peak"] <= found["memory_limit_bytes"]
    tokens = 256 * 4096
    assert found["step_seconds"] * found["tokens_per_second_per_device"] * 64 == pytest.approx(tokens)
    assert found["mfu"] == pytest.approx(found["model_flops_per_step"] / found["step_seconds"] / 64 / 989e12)
    assert found["days"] == pytest.approx(500000 * found["step_seconds"] / 86400)
    ep = found["traffic_bytes"]["ep/all_to_all"]
    assert (ep["ranks"], ep["nodes"], ep["between_nodes"]) == (8, 1, 0)
    assert found["traffic_bytes"]["pp/send"]["between_nodes"] == found["traffic_bytes"]["pp/send"]["sent"]


def test_optimizer_state_is_twelve_bytes_of_every_shard(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--config", str(CONFIGS / "sharding-32.yaml"), "--dtype", "bf16", "--sharding-stage", "1")
    stage = found["memory_bytes"][0]
    assert stage["parameters"] == 2 * found["parameters"]
    assert stage["optimizer"] == pytest.approx(12 * found["parameters"] / 32, rel=0.01)


def test_one_rank_holds_the_same_at_each_sharding_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        plan(capsys, "--model", "moe", *MOE, "--world-size", "1", "--dtype", "bf16", "--sharding-stage", stage)
        for stage in ("1", "2", "3")
    ]
    for one in found:
        held, elements = one["memory_bytes"][0], one["parameters"]
        sizes = [held[part] for part in ("parameters", "gradients", "optimizer")]
        assert sizes == [pytest.approx(each * elements, rel=0.01) for each in (2, 4, 12)]


def test_gradients_of_whole_experts_are_held_at_stage_2(capsys: pytest.CaptureFixture[str]) -> None:
    """No other rank has these experts: each of 8 ranks holds an eighth of them, and of the other gradients."""
    flags = ("--world-size", "8", "--ep-degree", "8", "--sharding-stage", "2")
    found = plan(capsys, "--model", "moe", *MOE, *flags)
    assert found["memory_bytes"][0]["gradients"] == pytest.approx(4 * found["parameters"] / 8, rel=0.01)


def test_it_needs_neither_torch_nor_a_second_and_no_time_grows_with_ranks() -> None:
    code = (
        "import sys\n"
        "from tests.support.pace import usual_seconds\n"
        "with usual_seconds() as seconds:\n"
        "    from megapar.tools.main import main\n"
        "    assert main(['plan', '--model', 'moe', '--num-layers', '64', '--num-experts', '64',"
        "'--hidden-size', '4096', '--num-attention-heads', '64',"
        "'--ep-degree', '8', '--pp-degree', '8', '--mp-degree', '8', '--world-size', '1048576',"
        "'--gradient-merge-acc-step', '8']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'numpy' not in sys.modules, 'data was imported'\n"
        "assert seconds.taken < 4, 'something grows with the number of ranks'\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "1048576 ranks" in run.stdout


def test_the_page_names_stages_groups_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(CONFIGS / "gpt-117m.yaml"), "--ranks"]) == 0
    said = capsys.readouterr().out
    assert "stage 1: 6 layers +head" in said
    assert "mp 4: 2 groups: 0 1 2 3 | 4 5 6 7" in said
    assert "MFU" in said
    assert "device-hours" in said


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--config", str(CONFIGS / "ernie-4.5-21b-a3b.yaml"), "--device-kind", "a100-40g")
    assert plan(capsys, *flags)["advice"].count("--recompute-interval 1") == 1  # what is on already helps no more
    found = plan(capsys, *flags, "--no-optimizer-offload")
    assert found["fits"] is False
    assert "more than the 40.0 GiB of a100-40g" in found["advice"]
    assert "it would fit with --recompute-interval 1 --optimizer-offload" in found["advice"]
    line = ("--num-layers", "96", "--hidden-size", "12288", "--num-attention-heads", "96", "--num-experts", "0")
    advice = plan(capsys, *line, "--device-kind", "v100")["advice"]
    wider = re.search(r"it would fit on (\d+) ranks with (--[^,]+),", advice)
    ranks, flags = int(wider[1]), wider[2].split()
    assert plan(capsys, *line, *flags, "--device-kind", "v100", "--world-size", str(ranks))["fits"]
    assert not plan(capsys, *line, *flags, "--device-kind", "v100", "--world-size", str(ranks // 2))["fits"]


def test_more_ranks_are_proposed_with_a_degree_that_the_rules_accept(capsys: pytest.CaptureFixture[str]) -> None:
    """A node of 72 devices: 72 divides neither the heads nor the widths, and nothing was proposed."""
    line = ["--num-layers", "100", "--hidden-size", "8192", "--num-attention-heads", "64", "--num-experts", "0"]
    line += ["--seq-length", "262144", "--micro-batch-size", "1"]
    kind = ("--device-kind", "gb200-186g")
    advice = plan(capsys, *line, *kind, "--world-size", "9")["advice"]
    wider = re.search(r"it would fit on (\d+) ranks with (--[^,]+),", advice)
    assert wider is not None, advice
    flags = [*wider[2].split(), "--world-size", wider[1]]
    assert "--mp-degree 64 " in wider[2]
    assert plan(capsys, *line, *kind, *flags)["fits"]
    parse("moe", [*line, *flags, "--validate-only", "--data-path", "mock"], {})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device-kind", "h100-80gb"), "Did you mean h100-80g"),
        (("--device-kind", "v100", "--dtype", "bf16"), "has no bf16 products"),
        (("--assume", "dualpipes"), "Did you mean dualpipe?"),
        (("--assume", "latent-attention:1536,512,128,64,128"), "choose one of fp8, fp8-mlp"),
        (("--assume", "dualpipe"), "has no pipeline to run in both directions. Set --pp-degree"),
        (("--assume", "operator-recompute:up@first"), "numbers and ranges"),
        (("--world-size", "8", "--mp-degree", "3"), "Nearest legal layouts: --mp-degree"),
        (("--numlayers", "3"), "unknown-flag"),
    ],
)
def test_wrong_input_is_refused(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    assert said in capsys.readouterr().err


def test_nearest_layouts_are_legal(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-experts", "0", "--num-attention-heads", "8", "--hidden-size", "512", "--world-size", "8")
    assert main(["plan", *flags, "--mp-degree", "16"]) == 2
    near = capsys.readouterr().err.split("Nearest legal layouts: ")[1].strip(" .\n").split("; ")
    for line in near:
        assert main(["plan", *flags, *line.split()]) == 0


def test_deepseek_v3_fits_and_what_it_assumes_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(CONFIGS / "deepseek-v3.yaml"), "--assume", "dualpipe"]) == 0
    said = capsys.readouterr().out
    assert "ASSUMED, megapar does not run this: dualpipe" in said
    assert "671" in said.splitlines()[0]
    assert "\nmulti-token prediction: 11.61 B parameters more, in training only\n" in said


def test_the_inputs_of_experts_activations_are_stored_in_one_byte(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", str(CONFIGS / "moonlight-16b-a3b.yaml"), "--recompute-interval", "0")
    words = [[], ["--assume", "fp8-swiglu"], ["--assume", "fp8-swiglu", "--assume", "operator-recompute:up"]]
    kept, narrow, none = (plan(capsys, *line, *more)["memory_bytes"][0]["activations"] for more in words)
    config = parse("moe", [*line, "--validate-only", "--world-size", "64"], {}, planning=True)
    sizes, tokens = config.model, config.training.micro_batch_size * config.model.seq_length
    gate_and_up = 2 * sizes.moe.ffn_hidden_size * sizes.moe.topk + 2 * sizes.moe.shared_width
    assert kept - narrow == tokens * gate_and_up * (sizes.num_layers - sizes.first_k_dense)
    assert none < narrow


def test_fp8_takes_two_bytes_of_each_weight_that_is_cast_and_saves_time(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--hidden-size", "4096", "--num-attention-heads", "32", "--num-query-groups", "8", "--num-layers", "4")
    line = (*sizes, "--num-experts", "0", "--ffn-hidden-size", "14336", "--seq-length", "8192", "--bf16")
    layouts = ((), ("--mp-degree", "2", "--sequence-parallel"), ("--sharding-stage", "3"))
    for layout in layouts:
        wide, narrow = (plan(capsys, *line, *layout, "--world-size", "4", *fp8) for fp8 in ((), ("--fp8",)))
        more = narrow["memory_bytes"][0]["parameters"] - wide["memory_bytes"][0]["parameters"]
        cast = 4 * 4096 * (48 * 128 + 4096 + 3 * 14336) // (2 if "--mp-degree" in layout else 1)
        assert more == (0 if "--sharding-stage" in layout else 2 * cast)
        assert 0.75 * wide["step_seconds"] < narrow["step_seconds"] < 0.95 * wide["step_seconds"]
    narrow, narrower = (plan(capsys, *MOE, "--fp8", *more) for more in ((), ("--fp8-experts",)))
    experts = 4 * 64 * 3 * 2048 * 1024
    assert narrower["memory_bytes"][0]["parameters"] - narrow["memory_bytes"][0]["parameters"] == 2 * experts
    assert 0.8 * narrow["step_seconds"] < narrower["step_seconds"] < narrow["step_seconds"]
    recipes = ((), ("--fp8-recipe", "tensorwise"))
    blocks, whole = (plan(capsys, *line, "--world-size", "1", "--fp8", *recipe)["step_seconds"] for recipe in recipes)
    assert 0.9 * blocks < whole < blocks  # products at 1.76 instead of 1.59 times bf16, and more bytes for casts
    assert main(["plan", *line, "--fp8"]) in (0, DOES_NOT_FIT)
    assert re.search(r"of fp8's peak +\d+\.\d% of 1979 TFLOP/s", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("ernie-4.5-300b-a47b", "299.5", "47.93"), ("ernie-4.5-21b-a3b", "21.83", "3.352"), ("mixtral-8x7b", None, None)],
)
def test_parameters_are_counted_as_validate_only_and_papers_count_them(
    name: str, total: str | None, active: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--config", str(CONFIGS / f"{name}.yaml"), "--validate-only"]
    assert main(["plan", *line[:2]]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    ranks = re.search(r"megapar plan: ([\d,]+) x", first)
    config = parse("moe", [*line, "--world-size", ranks[1].replace(",", "")], {}, planning=True)  # type: ignore[index]
    counted, passed = (count / 1e9 for count in parameter_counts(config.model))
    assert f"{counted:.4g} B parameters, {passed:.4g} B active per token" in first
    assert total is None or f"{total} B parameters, {active} B active per token" in first


def test_the_norms_of_latent_attention_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--config", str(CONFIGS / "deepseek-v3.yaml"))
    assert found["parameters"] == 671_026_404_352  # as transformers' DeepseekV3ForCausalLM of the published config.json
    assert found["training_parameters"] == 11_610_067_968  # of layer 61, without its copies of embedding and head


LATENT = ("--multi-latent-attention", "--q-lora-rank", "64", "--kv-lora-rank", "32", "--qk-head-dim", "16")
LATENT += ("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--num-query-groups", "4")


def test_latent_attention_is_planned_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", str(CONFIGS / "tiny.yaml"), "--device-kind", "cpu", "--world-size", "2", *LATENT)
    for strategy in ((), ("--sharding-segment-strategy", "segment_anchors", "--segment-anchors", "layers.2")):
        found = plan(capsys, *line, *strategy)
        parts = found["memory_bytes"][0]
        assert parts["gradients"] >= 4 * found["parameters"]
        assert parts["peak"] >= parts["parameters"] + parts["optimizer"] + parts["gradients"]


def test_up_projections_made_again_are_told_apart_from_model_flops(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", str(CONFIGS / "moonlight-16b-a3b.yaml"))
    alone, latents, heads = (plan(capsys, *line, *more) for more in ((), _over_cp("latent"), _over_cp("kv")))
    assert alone["model_flops_per_step"] == latents["model_flops_per_step"] == heads["model_flops_per_step"]
    tokens = 2048 * 8192
    assert alone["extra_flops_per_step"] == 27 * tokens * 2 * 512 * 16 * (128 + 128)  # keys and values once more
    assert heads["extra_flops_per_step"] == alone["extra_flops_per_step"]
    assert latents["extra_flops_per_step"] == (1 + 4) * alone["extra_flops_per_step"]  # of the other rank's columns
    sent = latents["traffic_bytes"]["cp/send"]["sent"] / heads["traffic_bytes"]["cp/send"]["sent"]
    assert sent == pytest.approx((512 + 64) / (16 * (128 + 64 + 128)))


def test_sequence_parallelism_sends_a_quarter_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Two all-reduces are four passes over what mp shares; a column's input is gathered once more, in the backward."""
    line = ("--config", str(CONFIGS / "llama-3-8b.yaml"), "--world-size", "4", "--mp-degree", "4")

    def sent(switch: str) -> int:
        found = plan(capsys, *line, switch)["traffic_bytes"]
        return sum(found[name]["sent"] for name in found if name.startswith("mp/"))

    assert sent("--sequence-parallel") == pytest.approx(1.25 * sent("--no-sequence-parallel"), rel=0.01)


def test_ranks_of_cp_send_the_keys_before_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/context.md has it, for one layer and one sequence; Ulysses sends the same with a window and without."""
    line = ("--config", str(CONFIGS / "llama-3-8b.yaml"), "--world-size", "4", "--cp-degree", "4", "--num-layers", "1")
    line = ("--config", str(CONFIGS / "llama-3-8b.yaml"), "--num-layers", "1", "--max-position-embeddings", "65536")
    line += ("--world-size", "4", "--cp-degree", "4", "--mp-degree", "1", "--no-sequence-parallel")
    page = (CONFIGS.parent / "docs" / "context.md").read_text(encoding="utf-8")

    def sent(way: str, length: int, window: str) -> dict[str, float]:
        flags = ("--context-parallel-algo", f"{way}_cp_algo", "--seq-length", str(length), "--window-size", window)
        flags += ("--global-batch-size", "1")
        found = plan(capsys, *line, *flags)["traffic_bytes"]
        return {name.removeprefix("cp/"): found[name]["sent"] / 2**20 for name in found if name.startswith("cp/")}

    for length in (4096, 16384, 65536):
        full, wide, narrow = (sent("megatron", length, window) for window in ("none", "4096", "128"))
        assert sent("allgather", length, "128") == narrow
        cells = [f"{full['send']:.0f}", f"{wide['all_to_all']:.0f}" if length > 4096 else "hides nothing"]
        assert f"| {length:,} | {' | '.join(cells)} | {narrow['all_to_all']:.1f} |" in page
        assert sent("ulysses", length, "128") == sent("ulysses", length, "none")


def _over_cp(exchange: str) -> tuple[str, ...]:
    return "--cp-degree", "2", "--mla-cp-exchange", exchange


def test_the_dispatch_of_experts_is_named_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen ranks of ep on two nodes of H100: a quarter of the rows crosses; on one node nothing changes."""
    flags = ("plan", *MOE, "--world-size", "16", "--ep-degree", "16", "--device-kind", "h100-80g")
    assert main([*flags]) == 0
    assert re.search(r"dispatch of experts: node \(\d\.\d+ times the speed of plain", capsys.readouterr().out)
    found = {way: plan(capsys, *flags[1:], "--moe-dispatch", way) for way in ("auto", "plain", "node")}
    assert found["auto"]["dispatch"] == "node"
    assert found["auto"]["traffic_bytes"] == found["node"]["traffic_bytes"]
    between = {way: sum(one["between_nodes"] for one in told["traffic_bytes"].values()) for way, told in found.items()}
    assert between["node"] < 0.5 * between["plain"]
    assert found["node"]["step_seconds"] < found["plain"]["step_seconds"]
    one = plan(capsys, *flags[1:], "--ranks-per-node", "16")
    assert one["dispatch"] == "plain"
    assert one["traffic_bytes"]["ep/all_to_all"]["between_nodes"] == 0


def test_a_trace_has_the_dispatch_that_is_planned() -> None:
    line = [*MOE, "--ep-degree", "16", "--validate-only"]
    run = Plan(parse("moe", line, {"WORLD_SIZE": "16"}, planning=True), device_kind("h100-80g")).run
    assert run.dispatch.node_ranks == 8
    assert (run.settled.moe.moe_dispatch, run.settled.parallel.ranks_per_node) == ("node", 8)
    assert run.config.moe.moe_dispatch == "auto"


def test_operators_are_computed_again_where_it_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--num-layers", "8", "--num-experts", "8", "--hidden-size", "1024", "--micro-batch-size", "4")
    found = [plan(capsys, *line, *more) for more in ((), _again("up@0-3"), _again("up@0-1,2,3"), _again("up"))]
    kept = [each["memory_bytes"][0]["activations"] for each in found]
    seconds = [each["step_seconds"] for each in found]
    assert kept[0] - kept[1] == kept[0] - kept[2] == pytest.approx((kept[0] - kept[3]) / 2)
    assert seconds[0] < seconds[1] == seconds[2] < seconds[3]


def _again(operators: str) -> tuple[str, ...]:
    return "--assume", f"operator-recompute:{operators}"


FEW_EXPERTS = ("--world-size", "4", "--ep-degree", "4", "--num-experts", "8", "--num-layers", "4")
ERNIE3 = ("--model", "ernie3", "--task-type-vocab-size", "5")
INTERLEAVED = (
    *("--world-size", "2", "--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2"),
    *("--recompute-interval", "1", "--num-experts", "0", "--num-layers", "4", "--gradient-merge-acc-step", "2"),
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*INTERLEAVED, "--recompute-in-bubble"), "does not run: [not-built-recompute-in-bubble]"),
        (("--sharding-stage", "3", "--no-overlap-grad-reduce"), "does not run: [not-built-stage-3-overlap-off]"),
        (("--adaptive-recompute-device-size", "61440"), "--recompute-interval 1, which needs the least memory"),
        ((*FEW_EXPERTS, "--ampipe-degree", "auto"), "Plan --ampipe-degree 1, 2 and 4"),
        (("--num-experts", "0", "--fp8", "--device-kind", "b200"), "for GPUs of compute capability 9.0 (Hopper), and"),
        (
            ("--num-experts", "0", "--fp8", "--fp8-recipe", "tensorwise", "--device-kind", "a100-80g"),
            "for GPUs of compute capability 8.9 or more (Ada), and",
        ),
        (("--device-kind", "a100-80g", "--assume", "fp8-mlp"), "a100-80g has no fp8 products"),
        ((*ERNIE3, "--assume", "operator-recompute:up"), "operator-recompute with --ernie-model ernie3"),
    ],
)
def test_what_has_no_formula_is_refused(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    error = capsys.readouterr().err
    assert NO_FORMULA in error
    assert said in " ".join(error.split())


def advised(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """Return the first advice of a plan that does not fit."""
    found = re.search(r"it would fit with (--[^:]+):", plan(capsys, *line)["advice"])
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        (("--recompute-granularity", "selective"), "29"),
        (("--recompute-method", "block", "--recompute-num-layers", "2"), "29"),
        (("--load-optim",), "30"),
        (("--gradient-merge-mode", "step", "--sharding-stage", "1"), "34"),
    ],
)
def test_advice_is_accepted_behind_the_line(
    flags: tuple[str, ...], memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--config", "llama-3-8b", "--world-size", "8", "--global-batch-size", "64", *flags)
    line += ("--device-kind", "a100-40g", "--device-memory-gib", memory)
    more = advised(capsys, *line)
    assert plan(capsys, *line, *more.split())["fits"]


def test_more_ranks_are_proposed_for_a_small_batch_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", "llama-3-8b", "--global-batch-size", "64", "--micro-batch-size", "1")
    line += ("--device-kind", "a100-40g", "--device-memory-gib", "12")
    advice = plan(capsys, *line, "--world-size", "8")["advice"]
    wider = re.search(r"it would fit on (\d+) ranks with (--[^,]+),", advice)
    assert wider is not None, advice
    assert plan(capsys, *line, *wider[2].split(), "--world-size", wider[1])["fits"]
    advice = plan(capsys, *line, "--world-size", "8", "--sharding-degree", "2")["advice"]
    assert f"on {wider[1]} ranks with {wider[2]}, without --sharding-degree," in advice
    advice = plan(capsys, *line, "--world-size", "8", "--no-overlap-grad-reduce")["advice"]
    assert ", without --no-overlap-grad-reduce, or " in advice


@pytest.mark.parametrize("memory", ["10", "14"])
def test_advice_on_more_ranks_keeps_the_merge_mode_of_the_line(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", "llama-3-8b", "--global-batch-size", "64", "--micro-batch-size", "1")
    line += ("--device-kind", "a100-40g", "--device-memory-gib", memory)
    line += ("--sharding-stage", "2", "--gradient-merge-mode", "step")
    advice = plan(capsys, *line, "--world-size", "8")["advice"]
    wider = re.search(r"it would fit on (\d+) ranks with (--[^,]+),", advice)
    assert wider is not None, advice
    assert plan(capsys, *line, *wider[2].split(), "--world-size", wider[1])["fits"]
