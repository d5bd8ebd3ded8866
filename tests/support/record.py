"""Records for tests of loggers."""

from __future__ import annotations

from typing import Any

from megapar.training.reports.record import Record


def record(iteration: int, **values: Any) -> Record:
    """Return a record of round numbers; ``values`` replace some of them."""
    numbers: dict[str, Any] = {
        **{"time": f"2026-01-01T00:00:{iteration % 60:02}.000+00:00", "consumed_samples": 8 * iteration},
        **{
            "consumed_tokens": 1024 * iteration,
            "predicted_tokens": 1024,
            "lm_loss": 1.5,
            "sop_loss": None,
            "mtp_loss": None,
            "aux_loss": None,
        },
        **{"z_loss": None, "sequence_loss": None, "orthogonal_loss": None, "loss": 1.5, "grad_norm": 1.0, "lr": 0.1},
        **{"loss_scale": 1.0, "skipped": False, "dropped_tokens": 0, "iteration_seconds": 0.5},
        **{"tokens_per_second": 2048.0, "model_tflops_per_device": 1.0, "mfu": 0.5, "mfu_peak": "measured"},
        **{"peak_memory_bytes": 1 << 20, "exposed_communication_seconds": None, "exposed_seconds": {}},
        "sent_bytes": {},
    }
    return Record(iteration=iteration, **{**numbers, **values})
