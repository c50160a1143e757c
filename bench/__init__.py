"""Measures of speed, each a file that runs alone: python -m bench.drain"""
