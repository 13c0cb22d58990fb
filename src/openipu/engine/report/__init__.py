"""Reports on runs, made from their facts alone: a page, JSON with a schema, and a trace for Perfetto."""
