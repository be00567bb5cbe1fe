"""A filter-pruned network without its dead filters: smaller layers, the same function."""
