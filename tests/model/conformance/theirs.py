"""The published class: as it is, or in true fp64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tests.model.conformance.answer import Answer, Batch
from tests.model.conformance.exact import NarrowMade, widened
from tests.model.conformance.rows import Row


def build(row: Row) -> Any:
    """The class in fp32 with weights that bf16 holds exactly, no bias or norm or correction bias at its first value."""
    torch.manual_seed(7)
    kind = getattr(transformers, row.architecture)
    model = kind(kind.config_class(**row.settings))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and "inv_freq" not in name:
                tensor.add_(0.2 * torch.randn(tensor.shape))
            elif "correction_bias" in name:
                tensor.add_(0.05 * torch.randn(tensor.shape))
            if "inv_freq" not in name:
                tensor.copy_(tensor.bfloat16())
    return model


def exact(row: Row, model: Any) -> Published:
    """The same model in true fp64, in eager forms. It is built in fp64, because frequencies are made with it."""
    with widened():
        config = type(model.config).from_dict(model.config.to_dict())
        forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
        wide = type(model)._from_config(config, dtype=torch.float64, **forms)
        wide.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    return Published(row, wide, widened)


def untouched(row: Row, folder: Path, dtype: torch.dtype) -> Published:
    """The class as ``from_pretrained`` gives it, in the forms that it chooses itself."""
    return Published(row, getattr(transformers, row.architecture).from_pretrained(folder, dtype=dtype))


class Published:
    """A published class that answers.

    Attributes:
        model: The class.
    """

    def __init__(self, row: Row, model: Any, mode: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """mode: What it runs in."""
        self.model, self._mode, self._encoder = model.train(not row.draws_noise), mode, row.encoder
        self._optimizer: torch.optim.Optimizer | None = None

    def answer(self, batch: Batch, watch: NarrowMade | None = None) -> Answer:
        """Run forward and backward. watch: Sees every operator."""
        self.model.zero_grad()
        with self._mode(), watch or nullcontext():
            out = self._run(batch, **self._labels(batch))
            out.loss.backward()
        return Answer(self._logits(out, batch.valid), float(out.loss.detach()), self.gradients())

    def balance(self, batch: Batch) -> tuple[float, dict[str, Tensor]] | None:
        """The load balancing loss of the layers, summed, and its gradients; None if the class has no such loss.

        The class pools its layers, and counts every choice of a token as one, where megapar counts 1 / k; so its own
        function is given one layer at a time.
        """
        function = getattr(sys.modules[type(self.model).__module__], "load_balancing_loss_func", None)
        if function is None:
            return None
        self.model.zero_grad()
        config = self.model.config
        with self._mode():
            logits = self._run(batch, output_router_logits=True).router_logits
            mask = batch.valid.to(torch.int64)
            topk = config.num_experts_per_tok
            losses = [function((one,), one.shape[1], topk, mask) / topk for one in logits]
            loss = torch.stack(losses).sum()
            loss.backward()
        return float(loss.detach()), self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of all trainable parameters, 0 where there is none."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        return self.in_folder({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()})

    def weights(self) -> dict[str, Tensor]:
        """The trainable parameters."""
        return self.in_folder({n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad})

    def in_folder(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by names of modules as tensors by names of files, which hold experts apart."""
        return {n: t.clone() for n, t in revert_weight_conversion(self.model, dict(tensors)).items()}

    def optimize(self, decays: Callable[[str], bool], lr: float, settings: Mapping[str, Any], decay: float) -> None:
        """Make the optimizer. decays: Whether a tensor of the folder decays."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        # Every tensor of the folder says by its values which parameter it is from.
        numbered = {n: torch.full_like(p.detach(), i) for i, (n, p) in enumerate(named.items())}
        kinds: dict[int, set[bool]] = {}
        for name, tensor in self.in_folder(numbered).items():
            kinds.setdefault(int(tensor.flatten()[0]), set()).add(decays(name))
        assert all(len(kind) == 1 for kind in kinds.values()), "a parameter decays in part"
        groups = [
            {
                "params": [p for i, p in enumerate(named.values()) if kinds[i] == {kind}],
                "weight_decay": decay if kind else 0.0,
            }
            for kind in (True, False)
        ]
        self._optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **settings)

    def step(self, batch: Batch) -> float:
        """Train on a batch; the loss before the step."""
        assert self._optimizer is not None
        self.model.zero_grad()
        with self._mode():
            loss = self._run(batch, **self._labels(batch)).loss
            loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def _run(self, batch: Batch, **more: Any) -> Any:
        more |= {"token_type_ids": batch.token_types} if self._encoder else {"use_cache": False}
        return self.model(input_ids=batch.tokens, attention_mask=batch.valid.to(torch.int64), **more)

    def _labels(self, batch: Batch) -> dict[str, Tensor]:
        order = {"next_sentence_label": batch.orders} if self._has_orders else {}
        return {"labels": batch.labels, **order}

    @property
    def _has_orders(self) -> bool:
        return type(self.model).__name__ == "ErnieForPreTraining"

    def _logits(self, out: Any, valid: Tensor) -> Tensor:
        if not self._has_orders:
            return out.logits.detach()[valid].flatten()
        return torch.cat(
            [out.prediction_logits.detach()[valid].flatten(), out.seq_relationship_logits.flatten().detach()]
        )
