"""What passes between a running program and Python."""
