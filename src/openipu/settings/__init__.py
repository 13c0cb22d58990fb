"""The options of `IPUConfig`: their names, types and rules, and the frozen form that the engine reads."""
