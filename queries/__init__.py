"""The statements of the queue: leases.py says who owns a task, schema.py what the database is."""
