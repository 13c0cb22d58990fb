"""Starts the instances of a script, on this machine or on several, and ends them all together."""
