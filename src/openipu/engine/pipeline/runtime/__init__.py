"""Stages at work: one compiled program that follows a schedule's table."""
