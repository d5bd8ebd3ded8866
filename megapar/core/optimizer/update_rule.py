"""The update of master weights from their gradients, by AdamW or SGD, with torch's fused kernels.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; Sutskever et al. 2013, "On the importance
of initialization and momentum in deep learning", in torch's form (the learning rate is outside of the momentum).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megapar.core.device.tensor_piece import ShardPieces
from megapar.core.optimizer.states import states_of
from megapar.core.sharding.master_shard import MasterShard

_FUSED_SGD = ("cpu", "cuda")  # torch_npu has a fused kernel of AdamW, and none of SGD


@dataclass(frozen=True)
class StepRates:
    """The rates of a step besides its learning rate.

    Attributes:
        decoupled_lr: Learning rate of shards that are ``decoupled``; None: that of all others.
        weight_decay: Weight decay; None: that of the rule.
    """

    decoupled_lr: float | None = None
    weight_decay: float | None = None


CONSTANT = StepRates()
"""The rates of a step with one learning rate and the weight decay of the rule."""


@dataclass(frozen=True)
class Update:
    """One update of master weights with the same learning rate and weight decay.

    Attributes:
        masters: Flat pieces of parameters, changed in place; remainders of those that have ``weights``.
        grads: Their gradients.
        states: For each name of ``UpdateRule.states``, that state of every master, changed in place.
        steps: Updates of each master so far, scalars in fp32, which the rule increments.
        found_inf: A scalar on the device; if it is 1, nothing changes. Only for devices that ``skips_updates``.
        grad_scale: A scalar in fp32 on the device, by which the kernel divides the gradients first. Only for devices
            that ``scales_gradients``, and masters in fp32.
        pieces: For each master, its pieces of Hugging Face tensors; empty for rules that do not round.
        weights: For each master, its bf16 weights if it is split, else None. Only for ``RoundedAdamW``.
    """

    masters: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    steps: list[Tensor]
    lr: float
    weight_decay: float
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    pieces: Sequence[ShardPieces] = ()
    weights: Sequence[Tensor | None] = ()

    def count(self) -> None:
        """Count the update in ``steps``, unless it is skipped."""
        if self.found_inf is None:
            torch._foreach_add_(self.steps, 1.0)
        else:  # a list: a single scalar on the device would be read on the host
            torch._foreach_add_(self.steps, [1.0 - self.found_inf] * len(self.steps))


class UpdateRule(ABC):
    """The update that an optimizer makes of master weights, and the states that it keeps of them.

    A rule works element by element on flat pieces of parameters, so that it needs no matrix whole.

    Attributes:
        router_lr_ratio: Learning rate of router weights relative to all other weights.
    """

    weight_decay: float
    router_lr_ratio: float

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """Names of its states. Each has the shape of the master, and is zero before the first update."""

    def state_dtype(self, name: str, master: torch.dtype) -> torch.dtype:
        """Return the dtype of a state of masters in dtype ``master``: the same, unless the rule rounds it."""
        return master

    @abstractmethod
    def apply(self, update: Update) -> None:
        """Change masters, states and steps in place."""

    def rates(self, shard: MasterShard, lr: float, rates: StepRates = CONSTANT) -> tuple[float, float]:
        """Return the learning rate and the weight decay of a shard in a step of learning rate ``lr``.

        A rule takes the product of both from the weights. It does not depend on the shard's ``lr_factor``.
        """
        if shard.decoupled and rates.decoupled_lr is not None:
            lr = rates.decoupled_lr
        decay = self.weight_decay if rates.weight_decay is None else rates.weight_decay
        lr *= (self.router_lr_ratio if shard.router else 1.0) * shard.lr_factor
        return lr, decay / shard.lr_factor if shard.decay else 0.0


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """AdamW: decoupled weight decay. Its states are the first and the second moment.

    Attributes:
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    router_lr_ratio: float = 1.0

    @property
    def states(self) -> tuple[str, ...]:
        return states_of("adamw")

    def apply(self, update: Update) -> None:
        """See ``UpdateRule``. Fused: the other forms read every step count and wait for the device."""
        adamw(
            params=update.masters,
            grads=update.grads,
            exp_avgs=update.states[0],
            exp_avg_sqs=update.states[1],
            max_exp_avg_sqs=[],
            state_steps=update.steps,
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=update.lr,
            weight_decay=update.weight_decay,
            eps=self.eps,
            maximize=False,
            found_inf=update.found_inf,
            grad_scale=update.grad_scale,
        )


@dataclass(frozen=True)
class Sgd(UpdateRule):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient.

    Attributes:
        momentum: Decay rate of the sum of gradients, the only state. 0: no momentum, and no state.
    """

    momentum: float
    weight_decay: float
    router_lr_ratio: float = 1.0

    @property
    def states(self) -> tuple[str, ...]:
        return states_of("sgd", self.momentum)

    def apply(self, update: Update) -> None:
        """See ``UpdateRule``. Without a fused kernel, master by master: foreach would copy all gradients to decay."""
        masters = update.masters
        sgd(
            params=masters,
            d_p_list=update.grads,
            momentum_buffer_list=[*update.states[0]] if update.states else [None] * len(masters),
            fused=masters[0].device.type in _FUSED_SGD,
            foreach=False,
            momentum=self.momentum,
            dampening=0.0,
            nesterov=False,
            lr=update.lr,
            weight_decay=update.weight_decay,
            maximize=False,
            found_inf=update.found_inf,
            grad_scale=update.grad_scale,
        )
        update.count()
