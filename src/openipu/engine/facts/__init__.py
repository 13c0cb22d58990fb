"""Facts about runs: values that reports show, and the recorder that collects them while a run is under way."""
