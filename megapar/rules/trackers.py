"""Rows on experiment trackers: their options need the flag that turns the tracker on."""

from __future__ import annotations

from megapar.schema.rule import NO_EFFECT, Rule, either, spell

_OPTIONS = {
    "wandb_project": ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
    "mlflow_experiment": ("mlflow_run_name", "mlflow_tracking_uri"),
    "swanlab_project": ("swanlab_exp_name", "swanlab_save_dir"),
}


def _options(switch: str, names: tuple[str, ...]) -> Rule:
    """Build the row that refuses a tracker's options without the flag that turns it on."""
    *others, last = map(spell, names)
    example = f"{spell(names[0])} first"
    return Rule(
        id=f"{switch.partition('_')[0]}-unused",
        reads=(switch, "not_default"),
        when=lambda f: getattr(f, switch) is None,
        requires=lambda f: not f.not_default & set(names),
        message=f"{', '.join(others)} and {last} have no effect without {spell(switch)}",
        fix=lambda f: f"Set {spell(switch)}, or leave out {either(spell(n) for n in names if n in f.not_default)}.",
        source=NO_EFFECT,
        passing=f"{spell(switch)} megapar {example}",
        failing=example,
    )


RULES: tuple[Rule, ...] = tuple(_options(switch, names) for switch, names in _OPTIONS.items())
