"""Text and JSON forms of a search: the best layouts, a command to start the first, and why no other is better."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from megapar.config.config import FLAGS
from megapar.core.units import GIBIBYTE
from megapar.planning.candidate import Candidate, spelled
from megapar.planning.knobs import Scope
from megapar.planning.plan import Plan
from megapar.planning.search import FASTER, Result, Search
from megapar.planning.variations import Variations
from megapar.schema.flag import SCRIPTS

SHOWN = 10
_ALWAYS = (
    ("mp", "mp_degree"),
    ("pp", "pp_degree"),
    ("cp", "cp_degree"),
    ("ep", "ep_degree"),
    ("mbs", "micro_batch_size"),
)


def describe(search: Search, near: Sequence[Result], command: str) -> str:
    """Format the best layouts, the command of the first, and its neighbours."""
    results, best = search.results.values(), search.best
    legal = [result.plan for result in results if result.plan is not None]
    lines = [f"{len(results):,} layouts tried, {len(legal):,} legal", ""]
    if not best:
        if not legal:
            return "\n".join([*lines, f"no layout is legal: {_refusal(results)}", ""])
        closest = search.closest[0].plan
        assert closest is not None
        return "\n".join([*lines, f"no layout fits; the closest: {closest.advice()}", ""])
    lines.append(f"{'step s':>9} {'MFU':>6} {'bubble':>7} {'GiB':>6}  layout")
    for result in best[:SHOWN]:
        assert result.plan is not None
        speed, memory = result.plan.speed, result.plan.fullest.reserved / GIBIBYTE
        lines.append(
            f"{speed.step_seconds:9.3f} {speed.mfu:6.1%} {speed.bubble_share:7.1%} {memory:6.1f}  "
            f"{_named(result.candidate)}"
        )
    lines += ["", "the command of the first", f"  {command}"]
    lines += ["", "one knob of it changed, and why that is not better", *_reasons(near, best[0])]
    return "\n".join([*lines, ""])


def to_dict(search: Search, near: Sequence[Result], command: str) -> dict[str, Any]:
    """Return the object that ``--json`` prints: the best plans with their flags, the command, and the neighbours."""
    best = search.best
    plans = [
        {"flags": result.candidate.flags(), **result.plan.to_dict()}
        for result in best[:SHOWN]
        if result.plan is not None
    ]
    reasons = {_change(one, best[0]): why_not(one, best[0]) for one in near}
    return {"looked_at": len(search.results), "best": plans, "command": command, "neighbours": reasons}


def launch_command(
    candidate: Candidate, variations: Variations, given: Sequence[str], world_size: int, node: int
) -> str:
    """Return the command that starts a candidate.

    On several nodes it is run on each: NODE is the node's number, HEAD the address of one of them.

    Args:
        candidate: The layout.
        variations: The command line that it varies.
        given: Files and flags that the layout belongs to.
        world_size: Number of ranks.
        node: Ranks of a node.
    """
    local = min(node, world_size)
    nodes = -(-world_size // local)
    start = f"megapar launch --nproc-per-node {local} "
    start += f"--nnodes {nodes} --node-rank $NODE --rdzv-endpoint $HEAD:29500 " if nodes > 1 else ""
    words = [SCRIPTS[variations.kind], *given, *spelled(variations.unstated(candidate.flags()))]
    if variations.file_world_size not in (None, world_size):
        words += ["--world-size", str(world_size)]
    return start + shlex.join(words)


def why_not(result: Result, best: Result) -> str:
    """Describe why a candidate is not better than the best one."""
    if result.plan is None:
        return result.refusal
    assert best.plan is not None
    if result.seconds * FASTER > best.seconds:
        return f"{result.seconds / best.seconds - 1:.1%} slower: {_slower(result.plan, best.plan)}"
    if not result.fits:
        over = (result.plan.fullest.reserved - result.plan.kind.memory_bytes) / GIBIBYTE
        return f"needs {over:.1f} GiB more than a device has, on stage {result.plan.fullest.stage}"
    return "as fast"


def why_none(scope: Scope) -> str:
    """Explain why a search has no candidates: the global batch is too small or not divisible."""
    heads = scope.sizes.num_attention_heads
    mps = [degree for degree in scope.degrees if degree <= scope.node and heads % degree == 0]
    used = [mp * cp for mp, cp in product(mps, scope.contexts) if scope.world_size % (mp * cp) == 0]
    least = scope.world_size // max(used)
    return (
        f"no layout of {scope.world_size:,} ranks can share a global batch of {scope.batch:,}: with the highest mp and "
        f"cp that the model allows, one sample for each stage of each data parallel rank is {least:,} samples. Set "
        f"--global-batch-size to a multiple of {least:,}, or use fewer ranks.\n"
    )


def _reasons(near: Sequence[Result], best: Result) -> Iterator[str]:
    """Yield a line for each neighbour; the refused ones, whose reasons ``--json`` has, are one line."""
    refused = []
    for one in near:
        words = _change(one, best)
        if one.plan is None:
            refused.append(f"{words} [{one.refusal[1:].partition(']')[0]}]")
        else:
            yield f"  {words}: {why_not(one, best)}"
    if refused:
        yield f"  refused: {'; '.join(refused)}"


def _change(one: Result, best: Result) -> str:
    """Return the flags in which a candidate differs from the best one, and those that it leaves to the default."""
    changes = one.candidate.differences(best.candidate)
    flags = spelled({name: value for name, value in changes.items() if value is not None})
    unset = [f"without {FLAGS[name].spelling}" for name, value in changes.items() if value is None]
    return " ".join([*flags, *unset])


def _named(candidate: Candidate) -> str:
    """Return the degrees and the micro-batch in short, and the other knobs as flags."""
    short = ", ".join(f"{word} {candidate.get(name)}" for word, name in _ALWAYS)
    more = {name: value for name, value in candidate.flags().items() if name not in set(dict(_ALWAYS).values())}
    return f"{short}  {' '.join(spelled(more))}".rstrip()


def _refusal(results: Iterable[Result]) -> str:
    """Return a refusal by the rule that refuses most."""
    refusals = [result.refusal for result in results]
    most, _ = Counter(text.partition("]")[0] for text in refusals).most_common(1)[0]
    return next(text for text in refusals if text.startswith(most))


def _slower(plan: Plan, best: Plan) -> str:
    """Describe the part of the time that grew most."""
    bubble = plan.speed.bubble_share - best.speed.bubble_share
    exposed = (
        plan.speed.exposed_seconds / plan.speed.step_seconds - best.speed.exposed_seconds / best.speed.step_seconds
    )
    optimizer = (plan.speed.optimizer_seconds - best.speed.optimizer_seconds) / plan.speed.step_seconds
    if optimizer > max(bubble, exposed, 0.005):
        return f"the optimizer takes {plan.speed.optimizer_seconds:.3f} s"
    if bubble > max(exposed, 0.005):
        return f"the bubble is {plan.speed.bubble_share:.1%}"
    if exposed > 0.005:
        return f"{plan.speed.exposed_seconds:.3f} s of communication are exposed"
    return "its matrix products are smaller, or it recomputes more"
