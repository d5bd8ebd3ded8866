"""NVIDIA apex as its source declares it, in plain torch on the CPU: same modules, signatures, dtypes and state.

After NVIDIA/apex, ``apex/normalization/fused_layer_norm.py``, ``apex/optimizers/fused_adam.py`` and
``csrc/megatron/fused_weight_gradient_dense.cpp``. As there, FusedAdam keeps its count in the group, adds to it by
what the last call found, and fixes the number of its parameters at the first call.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

CALLS: list[str] = []


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    assert weight.shape == torch.Size(normalized_shape)
    CALLS.append("rms_norm")
    return F.rms_norm(input, weight.shape, weight, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    assert weight.shape == torch.Size(normalized_shape)
    CALLS.append("layer_norm")
    return F.layer_norm(input, weight.shape, weight, bias, eps)


def wgrad_gemm_accum_fp32(input_2d: Tensor, d_output_2d: Tensor, main_grad: Tensor) -> None:
    assert all(x.dim() == 2 and x.is_contiguous() for x in (input_2d, d_output_2d, main_grad))
    assert input_2d.dtype == d_output_2d.dtype in (torch.bfloat16, torch.float16)
    assert main_grad.dtype == torch.float32
    CALLS.append("product")
    main_grad += d_output_2d.t().float() @ input_2d.float()


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999), eps: float = 1e-8,
        adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
        capturable: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        assert capturable
        assert adam_w_mode
        assert not amsgrad
        assert not master_weights
        options = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": torch.tensor(lr, dtype=torch.float32), **options})
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        self.parameters: int | None = None

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
        CALLS.append("adam")
        for group in self.param_groups:
            if "step" in group:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            else:
                group["step"] = torch.tensor([1], dtype=torch.int)
            assert group["step"].dtype == torch.int32
            assert group["step"].shape == (1,)
            self.parameters = self.parameters or len(group["params"])
            assert self.parameters == len(group["params"])
            self._dummy_overflow_buf.copy_(grad_scaler._check_inf_per_device(self)[group["params"][0].device])
            inverse = grad_scaler._get_scale_async().double().reciprocal().float()
            if self._dummy_overflow_buf:
                continue
            (beta1, beta2), step = group["betas"], int(group["step"])
            for p in group["params"]:
                assert p.dtype == torch.float32
                grad, state = p.grad * inverse, self.state[p]
                state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
                state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad)
                size = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
                change = state["exp_avg"] / (1 - beta1**step) / size + group["weight_decay"] * p
                p.sub_(group["lr"] * change)


MODULES: dict[str, dict[str, Any]] = {
    "apex.normalization": {},
    "apex.normalization.fused_layer_norm": {
        "fused_rms_norm_affine": fused_rms_norm_affine,
        "fused_layer_norm_affine": fused_layer_norm_affine,
    },
    "apex.optimizers": {"FusedAdam": FusedAdam},
    "fused_layer_norm_cuda": {},
    "amp_C": {"multi_tensor_adam_capturable": None},
    "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": wgrad_gemm_accum_fp32},
}


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, without: str = "") -> list[str]:
    """Let this process find apex, ``without`` one of its modules. Returns the names of the calls from now on."""
    (folder / "apex" / "optimizers").mkdir(parents=True)
    (folder / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    for name, content in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, None if name == without else module)  # type: ignore[arg-type]
    CALLS.clear()
    return CALLS
