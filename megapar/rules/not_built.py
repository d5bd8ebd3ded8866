"""Features that come with a later version: one row each. Building a feature removes its line."""

from __future__ import annotations

from megapar.rules.rule import MODELS, NOT_BUILT, Rule, Test

MOE = ("moe",)
ERNIE = ("ernie",)


def _later(name: str, feature: str, failing: str, models: tuple[str, ...] = MODELS, when: Test | None = None) -> Rule:
    """The row `a flag away from its default needs a feature that is not there yet` (or where ``when`` holds)."""
    spelled = "--" + name.replace("_", "-").replace("broadcast-mb", "broadcast-MB")
    return Rule(
        id=f"not-built-{name.replace('_', '-')}",
        reads=(name, "changed") if when is None else (name, "asked"),
        when=when or (lambda f: name in f.changed),
        requires=lambda f: False,
        message=f"{spelled} asks for {feature}, which this version does not have yet",
        fix="Leave it out.",
        source="later version",
        passing="",
        failing=failing,
        kind=NOT_BUILT,
        models=models,
    )


def _ahead(name: str, what: str, failing: str) -> Rule:
    """The row that refuses to recompute apart from the backward, with the reason."""
    return Rule(
        id=f"not-built-{name.replace('_', '-')}",
        reads=(name, "changed"),
        when=lambda f: name in f.changed,
        requires=lambda f: False,
        message=(
            f"--{name.replace('_', '-')} would recompute {what}: the schedules know forward, backward and "
            "weight-gradient actions but none that recomputes, and what is recomputed early is held from then on, "
            "which is the memory that recompute saves"
        ),
        fix="Leave it out: a unit is recomputed when its gradient arrives.",
        source="later version",
        passing="",
        failing=failing,
        kind=NOT_BUILT,
    )


def _beside_cp(id: str, name: str, asked: Test, spelled: str, failing: str) -> Rule:
    """The row `what slices the experts' layers is not there beside sequences that ranks share`."""
    return Rule(
        id=id,
        reads=(name, "cp_degree"),
        when=lambda f: f.cp_degree > 1 and asked(f),
        requires=lambda f: False,
        message=f"{spelled} slices sequences that are whole on a rank, which --cp-degree cuts",
        fix="Leave one of them out.",
        source="later version",
        passing="",
        failing=failing,
        kind=NOT_BUILT,
        models=MOE,
    )


RULES: tuple[Rule, ...] = (
    _beside_cp(
        "not-built-cp-ampipe",
        "ampipe_degree",
        lambda f: f.ampipe_degree != 1,
        "--ampipe-degree",
        "--world-size 2 --cp-degree 2 --ampipe-degree 2",
    ),
    _beside_cp(
        "not-built-cp-pipe-experts",
        "use_pipe_experts",
        lambda f: f.use_pipe_experts,
        "--use-pipe-experts",
        "--world-size 2 --cp-degree 2 --use-pipe-experts",
    ),
    _ahead("recompute_in_advance", "before the gradient arrives", "--recompute-in-advance"),
    _ahead("recompute_in_bubble", "in idle slots of the pipeline", "--recompute-in-bubble"),
    Rule(
        id="not-built-multi-latent-attention",
        reads=("multi_latent_attention", "changed"),
        when=lambda f: f.multi_latent_attention,
        requires=lambda f: False,
        message=(
            "--multi-latent-attention asks for DeepSeek's compressed keys and values, whose parameters and caches no "
            "layer here has; attention is multi-head or grouped-query"
        ),
        fix="Leave it out, or choose --num-query-groups.",
        source="later version",
        passing="",
        failing="--multi-latent-attention",
        kind=NOT_BUILT,
        models=MOE,
    ),
    _later("compile", "torch.compile", "--compile"),
    _later("fp8", "fp8 linear layers", "--fp8"),
)
