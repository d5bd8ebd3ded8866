"""The update of master weights from their gradients, by AdamW or SGD, with torch's fused kernels or others.

``RoundedAdamW`` has two-byte state: moments, gradients, and master weights as remainders (``core.device.adamw``).
``ApexAdamW`` has the states and step counts of ``AdamW``, and the kernel of NVIDIA apex's FusedAdam.

Sources: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; Sutskever et al. 2013, "On the importance
of initialization and momentum in deep learning", in torch's form (the learning rate is outside of the momentum);
NVIDIA/apex, ``apex/optimizers/fused_adam.py``, in its form for CUDA graphs (``capturable``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megapar.core.device.adamw import AdamWStep
from megapar.core.device.apex import fused_adam
from megapar.core.device.dtypes import widest
from megapar.core.device.ops import op
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


CONSTANT = StepRates()  # the rates of a step with one learning rate and the weight decay of the rule


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


@dataclass(frozen=True)
class RoundedAdamW(AdamW):
    """``AdamW`` whose moments and gradients may be bf16, and whose masters may be split.

    Attributes:
        rounds: For each moment, whether it is kept in bf16, or else in the dtype of the masters.
    """

    rounds: tuple[bool, bool] = (False, False)

    def state_dtype(self, name: str, master: torch.dtype) -> torch.dtype:
        """See ``UpdateRule``."""
        return torch.bfloat16 if self.rounds[self.states.index(name)] else master

    def apply(self, update: Update) -> None:
        """See ``UpdateRule``."""
        number = (update.steps[0] + 1).to(torch.int64)
        step = AdamWStep(number, self._numbers(update), update.found_inf, update.grad_scale)
        form, shards = op("adamw", step.numbers), (update.masters, update.grads, *update.states, update.weights)
        for *tensors, pieces in zip(*shards, update.pieces, strict=True):
            form(tuple(tensors), pieces, step)
        update.count()

    def _numbers(self, update: Update) -> Tensor:
        """Return ``AdamWStep.numbers``, without a copy from the host, which would wait for the device."""
        (beta1, beta2), number = self.betas, (update.steps[0] + 1).to(widest(update.steps[0].device))
        rate, root = (1 - beta1**number).reciprocal() * update.lr, (1 - beta2**number).sqrt()
        known = beta1, 1 - beta1, beta2, 1 - beta2, self.eps, 1 - update.lr * update.weight_decay
        numbers = torch.stack([rate, root, *(torch.full_like(rate, value) for value in known)])
        return numbers.to(torch.promote_types(update.grads[0].dtype, torch.float32))


class _ApexScaler:
    """The two methods of torch's GradScaler that FusedAdam calls."""

    def __init__(self, found_inf: Tensor, scale: Tensor) -> None:
        self._found_inf, self._scale = found_inf, scale

    def _check_inf_per_device(self, _: object) -> dict[torch.device, Tensor]:
        return {self._found_inf.device: self._found_inf}

    def _get_scale_async(self) -> Tensor:
        return self._scale


class _ApexKernel:
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
        self._adam.step(
            grad_scaler=_ApexScaler(found_inf, self._one if update.grad_scale is None else update.grad_scale)
        )
        for master in update.masters:
            master.grad = None
        self._skipped.copy_(found_inf.view(()))
        update.count()


@dataclass(frozen=True)
class ApexAdamW(AdamW):
    """``AdamW`` by apex's kernel, for masters in fp32 on an NVIDIA GPU."""

    _kernels: dict[int, _ApexKernel] = field(default_factory=dict, compare=False)  # by their number of masters

    def apply(self, update: Update) -> None:
        """See ``UpdateRule``."""
        number = len(update.masters)
        if number not in self._kernels:
            self._kernels[number] = _ApexKernel(self, update.masters)
        self._kernels[number].apply(update)
