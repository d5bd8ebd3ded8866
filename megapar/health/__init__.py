"""Health of a run by idea: hangs, corruption, start, stop; what core uses and what training adds stand side by side."""
