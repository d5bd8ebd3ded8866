"""Configuration of a run: one frozen dataclass per group, one field per flag."""
