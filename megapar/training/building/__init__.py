"""From a configuration to a model on this rank with its sharding and optimizer."""
