"""Benchmarks: everything they compare is measured in one run, interleaved, and printed as ratios."""
