"""Files of a checkpoint: names, layout, shards, records of faults."""
