"""The only place that names cuda or npu."""
