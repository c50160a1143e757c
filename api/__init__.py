"""The HTTP surface beside the three endpoints in main.py, and what they all share."""
