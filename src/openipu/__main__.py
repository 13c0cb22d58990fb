"""`python -m openipu` is the `openipu` command."""

from openipu.cli import app

app(prog_name="openipu")
