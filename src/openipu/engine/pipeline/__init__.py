"""Pipelining: schedules as tables, and what an executor needs to run any of them."""
