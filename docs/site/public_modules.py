"""Which modules of the package are public. The API reference has a page for each of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "openipu"
MODEL_METHODS = "openipu.keras.extensions.ModelExtension"
"""The class with the methods of models."""
NOT_FOR_USERS = ("^_", "^make_", "^jax_", "_assets$")
"""The methods of models that Keras calls by itself, as regular expressions."""


def exported(module: Path) -> list[str]:
    """The names in `__all__` of a source file."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def public_modules(folder: Path = PACKAGE, name: str = "openipu") -> Iterator[str]:
    """Every public module by its full name: those in `__all__`, and those in the `__all__` of a package among them."""
    for child in exported(folder / "__init__.py"):
        if (folder / f"{child}.py").exists():
            yield f"{name}.{child}"
        elif (folder / child / "__init__.py").exists():
            yield f"{name}.{child}"
            yield from public_modules(folder / child, f"{name}.{child}")
