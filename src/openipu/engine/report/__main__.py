"""Prints the JSON schema of report.json, for the file report.schema.json in this folder."""

import json
import sys

from .files import schema

sys.stdout.write(json.dumps(schema(), indent=1) + "\n")
