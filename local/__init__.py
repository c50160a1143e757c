"""Stand-ins for a bare machine: an embedded Postgres and a small local model, and their starter."""
