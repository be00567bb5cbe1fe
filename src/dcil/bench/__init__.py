"""Benchmarks: what they compare is measured in turns in one run and printed as ratios (``clock``)."""
