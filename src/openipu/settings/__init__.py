"""The options of `IPUConfig` as values: their names, types, rules, and the frozen form that the engine reads."""
