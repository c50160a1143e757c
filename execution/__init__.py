"""What a claimed task does. runner.py carries tasks out; each kind has a module of its own."""
