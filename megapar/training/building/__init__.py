"""The model of this rank with its sharding and optimizer, built from a configuration."""
