"""The update of master weights from their gradients, by AdamW or SGD, with torch's fused kernels.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; Sutskever et al. 2013, "On the importance
of initialization and momentum in deep learning", in torch's form (the learning rate is outside of the momentum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megapar.core.optimizer.states import states_of

_FUSED_SGD = ("cpu", "cuda")  # torch_npu has a fused kernel of AdamW, and none of SGD


class UpdateRule(Protocol):
    """The update that an optimizer makes of master weights, and the states that it keeps of them.

    A rule works element by element on flat pieces of parameters, so that it needs no matrix whole.

    Attributes:
        states: Names of its states. Each has the shape and dtype of the master, and is zero before the first update.
        weight_decay: Of the weights that decay.
        router_lr_ratio: Learning rate of router weights relative to all other weights.
    """

    @property
    def states(self) -> tuple[str, ...]: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def router_lr_ratio(self) -> float: ...

    def update(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """Update masters and their states in place.

        Args:
            masters: Master weights with the same learning rate and weight decay.
            grads: Their gradients.
            states: For each name of ``states``, that state of every master.
            steps: Updates of each master so far, scalars in fp32, which this increments.
            lr: Learning rate.
            weight_decay: Weight decay.
            found_inf: See ``Optimizer.step``.
            grad_scale: See ``Optimizer.step``.
        """


@dataclass(frozen=True)
class AdamW:
    """AdamW: decoupled weight decay.

    Attributes:
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: See ``UpdateRule``.
        router_lr_ratio: See ``UpdateRule``.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    router_lr_ratio: float = 1.0

    @property
    def states(self) -> tuple[str, ...]:
        """The first and the second moment."""
        return states_of("adamw")

    def update(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """See ``UpdateRule``. Fused: the other forms read every step count and wait for the device."""
        adamw(
            params=masters,
            grads=grads,
            exp_avgs=states[0],
            exp_avg_sqs=states[1],
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
            found_inf=found_inf,
            grad_scale=grad_scale,
        )


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum; weight decay is added to the gradient.

    Attributes:
        momentum: Decay rate of the sum of gradients. 0: no momentum, and no state.
        weight_decay: See ``UpdateRule``.
        router_lr_ratio: See ``UpdateRule``.
    """

    momentum: float
    weight_decay: float
    router_lr_ratio: float = 1.0

    @property
    def states(self) -> tuple[str, ...]:
        """The sum of gradients, unless there is no momentum."""
        return states_of("sgd", self.momentum)

    def update(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """See ``UpdateRule``. Without a fused kernel, master by master: foreach would copy all gradients to decay."""
        sgd(
            params=masters,
            d_p_list=grads,
            momentum_buffer_list=[*states[0]] if states else [None] * len(masters),
            fused=masters[0].device.type in _FUSED_SGD,
            foreach=False,
            momentum=self.momentum,
            dampening=0.0,
            nesterov=False,
            lr=lr,
            weight_decay=weight_decay,
            maximize=False,
            found_inf=found_inf,
            grad_scale=grad_scale,
        )
        torch._foreach_add_(steps, 1.0 if found_inf is None else 1.0 - found_inf)
