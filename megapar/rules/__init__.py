"""Rows of the compatibility matrix. Standard library only; rows read plain values by name and have no side effects."""
