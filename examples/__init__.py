"""Worked examples; docs/own-graph.md tells their story."""
