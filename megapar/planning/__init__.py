"""Plans: the memory, traffic and time of a configuration, from its flags alone; no torch, no accelerator."""
