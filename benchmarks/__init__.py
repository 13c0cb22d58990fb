"""Speed measured against real peers in the same run. `python -m benchmarks` measures; the results are in `results/`."""
