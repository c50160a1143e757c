"""What POST /tasks is compared with: endpoints that take its body and do less."""
