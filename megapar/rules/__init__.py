"""The rows of the compatibility matrix. Standard library only; rows read plain values by name and write nothing."""
