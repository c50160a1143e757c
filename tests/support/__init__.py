"""What several test rooms share: stand-ins that can be told to misbehave."""
