"""Numbers of ``calibration.py``, written by ``python -m benchmarks.prediction.fit --write``."""

from typing import Any

SHARES: dict[str, Any] = {
    "product": 0.7893,
    "small": 295.7,
    "fp8": 0.6962,
    "inside": 0.8,
    "between": 0.85,
    "shown": 0.25,
    "jitter": 0.0005,
}
CLOCKS: dict[str, tuple[float, float]] = {
    "b200-180g": (0.9266, 0.8058),
    "gb200-186g": (0.8287, 0.7206),
    "gb300-288g": (1.139, 0.9904),
    "b300-288g": (1.139, 0.9904),
}
SOFTWARE: dict[str, dict[str, Any]] = {
    "megapar": {
        "scores": 0.46,
        "memory": 0.87,
        "bytes": {},
        "grouped": 0.95,
        "launches": {
            "qkv": (3, 5),
            "core": (1, 4),
            "router": (16, 10),
            "dispatch": (12, 10),
            "activation": (1, 1),
            "residual": (1, 1),
        },
        "wait": 4.0,
        "launches_per_expert": 0.0,
        "fp8_launches_per_expert": 0.0,
        "cast": 0.0,
        "launch": 1.0,
    },
    "megatron": {
        "scores": 0.5664,
        "memory": 0.5792,
        "bytes": {
            "head": 0.25,
            "qkv": 0.7019,
            "latents": 0.7019,
            "kv": 0.7019,
            "proj": 0.7019,
            "up": 0.7019,
            "down": 0.7019,
            "router": 1.274,
            "dispatch": 1.274,
        },
        "grouped": 1.0,
        "launches": {
            "qkv": (3, 5),
            "core": (1, 4),
            "router": (16, 10),
            "dispatch": (12, 10),
            "activation": (1, 1),
            "residual": (1, 1),
        },
        "wait": 73.91,
        "launches_per_expert": 1.0,
        "fp8_launches_per_expert": 9.851,
        "cast": 4.013,
        "launch": 0.8451,
    },
}
