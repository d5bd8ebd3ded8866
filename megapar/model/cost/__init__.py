"""Cost types, and the costs of operators that models share."""
