"""Runs stages: one compiled program per execution, which follows the table of a schedule."""
