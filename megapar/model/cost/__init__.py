"""Types of costs, and the costs of the operators that models share. Standard library only."""
