"""What a run is made of: the names of its steps, their order, templates. Nothing here does I/O."""
