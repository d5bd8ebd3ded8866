"""The loop around a step: the stepper, callbacks, and the outline that --validate-only prints."""
