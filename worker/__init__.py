"""The parts of a worker process; scheduler.py puts them together."""
