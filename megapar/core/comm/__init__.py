"""Communication between the ranks of a mesh axis: collectives, queues, process groups, and records of what was sent."""
