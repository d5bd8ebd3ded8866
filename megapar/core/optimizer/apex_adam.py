"""The update of AdamW by NVIDIA apex's FusedAdam, with the states and step counts of ``AdamW``.

Source: NVIDIA/apex, ``apex/optimizers/fused_adam.py``, in its form for CUDA graphs (``capturable``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapar.core.device.apex import fused_adam
from megapar.core.optimizer.update_rule import AdamW, Update


class _Scaler:
    """The two methods of torch's GradScaler that FusedAdam calls."""

    def __init__(self, found_inf: Tensor, scale: Tensor) -> None:
        self._found_inf, self._scale = found_inf, scale

    def _check_inf_per_device(self, _: object) -> dict[torch.device, Tensor]:
        return {self._found_inf.device: self._found_inf}

    def _get_scale_async(self) -> Tensor:
        return self._scale


class _Kernel:
    """A FusedAdam of a number of masters, whichever they are in a step."""

    def __init__(self, rule: AdamW, masters: list[Tensor]) -> None:
        device = masters[0].device
        options: dict[str, Any] = {"adam_w_mode": True, "capturable": True}
        self._adam = fused_adam()(masters, lr=0.0, betas=rule.betas, eps=rule.eps, weight_decay=0.0, **options)
        self._skipped = torch.zeros((), device=device)  # 1 if the last call changed nothing
        self._one = torch.ones(1, device=device)

    def apply(self, update: Update) -> None:
        """Change masters, states and steps in place."""
        group = self._adam.param_groups[0]
        group["params"] = update.masters
        group["lr"].fill_(update.lr)
        group["weight_decay"] = update.weight_decay
        # The count is the group's, and FusedAdam first adds 1, or nothing if its last call skipped an update.
        group["step"] = (update.steps[0] + self._skipped).view(1).to(torch.int32)
        self._adam.state.clear()
        for master, grad, *moments in zip(update.masters, update.grads, *update.states, strict=True):
            master.grad = grad
            self._adam.state[master] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        found_inf = torch.zeros_like(self._one) if update.found_inf is None else update.found_inf
        self._adam.step(grad_scaler=_Scaler(found_inf, self._one if update.grad_scale is None else update.grad_scale))
        for master in update.masters:
            master.grad = None
        self._skipped.copy_(found_inf.view(()))
        update.count()


@dataclass(frozen=True)
class ApexAdamW(AdamW):
    """``AdamW`` by apex's kernel, for masters in fp32 on an NVIDIA GPU."""

    _kernels: dict[int, _Kernel] = field(default_factory=dict, compare=False)  # by their number of masters

    def apply(self, update: Update) -> None:
        """See ``UpdateRule``."""
        number = len(update.masters)
        if number not in self._kernels:
            self._kernels[number] = _Kernel(self, update.masters)
        self._kernels[number].apply(update)
