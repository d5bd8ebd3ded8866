"""Settings that a plan refuses because it has no formula for their cost."""

from __future__ import annotations

from megapar.arguments import Config
from megapar.config.config import NOT_BUILT_NOTE
from megapar.core.device.kinds import DeviceKind
from megapar.errors import Complaint, ConfigError
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.planning.assume import Assumed

RULE = "plan-no-formula"


def check_priced(config: Config, kind: DeviceKind, assumed: Assumed) -> None:
    """Raise ConfigError if the plan would have to guess what a setting costs."""
    missing = [note.removeprefix(NOT_BUILT_NOTE) for note in config.notes if note.startswith(NOT_BUILT_NOTE)]
    complaints = [Complaint(RULE, f"A plan has no formula for what megapar does not run: {one}") for one in missing]
    for unpriced, message, fix in (
        (
            config.recompute.adaptive_recompute_device_size > 0,
            "--adaptive-recompute-device-size chooses the layers by what the run measures, which a plan does not know.",
            "Plan --recompute-interval 1, which needs the least memory, and no recompute, which is the fastest.",
        ),
        (
            config.ampipe.ampipe_degree == 0,
            "--ampipe-degree auto chooses the degree by what the run measures, which a plan does not know.",
            "Plan --ampipe-degree 1, 2 and 4, which are what it chooses from.",
        ),
        (
            config.training.fp8,
            "A plan has no formula for --fp8, which leaves the experts in bf16 and adds the scaling of tensors.",
            "Leave it out, or plan all linear layers in fp8, the experts too: --assume fp8.",
        ),
        (
            bool(assumed.fp8) and "fp8" not in kind.flops,
            f"{kind.title} has no fp8 products (--assume fp8).",
            "Leave it out, or choose another --device-kind.",
        ),
        (
            bool(assumed.operators) and isinstance(config.model, Ernie3Sizes),
            "A plan has no formula for --assume operator-recompute with --ernie-model ernie3.",
            "Leave it out, or use --recompute-granularity selective.",
        ),
    ):
        if unpriced:
            complaints.append(Complaint(RULE, message, fix))
    if complaints:
        raise ConfigError(complaints)
