"""Cost types, and the costs of operators that models share. Standard library only."""
