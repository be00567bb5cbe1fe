"""Remove the dead filters of a filter-pruned network."""
