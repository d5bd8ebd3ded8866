"""One optimizer step: batches, gradients, the step guard, evaluation."""
