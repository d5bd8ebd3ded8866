"""Plans: memory, traffic and time of a configuration, computed from its flags without torch or an accelerator."""
