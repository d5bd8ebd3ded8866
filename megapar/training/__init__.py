"""The parts of the trainer: building a job from a configuration, its state, what it reports and exports."""
