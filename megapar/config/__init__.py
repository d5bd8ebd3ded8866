"""What may be asked for: one frozen dataclass per group, one field per flag. Standard library only."""
