"""Communication: what the ranks of a mesh axis send each other, and the accounts that are kept of it."""
