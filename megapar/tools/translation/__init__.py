"""Translation tables for the arguments of other frameworks: data, one file per framework."""
