"""How it runs: plans, feeds, the compiled loop and the passes over it."""
