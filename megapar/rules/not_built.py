"""Features that come with a later version: one row each. Building a feature removes its line."""

from __future__ import annotations

from megapar.schema.rule import NOT_BUILT, Rule

MOE = ("moe",)
ERNIE = ("ernie",)


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


RULES: tuple[Rule, ...] = (
    Rule(
        id="not-built-cp-pipe-experts",
        reads=("use_pipe_experts", "ampipe_degree", "cp_degree"),
        when=lambda f: f.cp_degree > 1 and f.use_pipe_experts and f.ampipe_degree <= 1,
        requires=lambda f: False,
        message=(
            "--use-pipe-experts without slices decides who is dropped by runs in order of position, and --cp-degree "
            "leaves a rank two runs of a sequence"
        ),
        fix="Add --ampipe-degree 2, or leave one of them out.",
        source="later version",
        passing="",
        failing="--world-size 2 --cp-degree 2 --use-pipe-experts",
        kind=NOT_BUILT,
        models=MOE,
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
)
