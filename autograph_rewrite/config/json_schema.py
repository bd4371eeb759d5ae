"""Print the published JSON schema of the configuration file, by which editors complete and check it.

python -m autograph_rewrite.config.json_schema > docs/config.schema.json
"""

from __future__ import annotations

import json
import sys

from autograph_rewrite.config.config import Config


def schema_text() -> str:
    """The text of docs/config.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.json_schema()}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
