"""Runs inside `.venv-clients/deployment`; prints a dashboard as Grafana's own model parses it.

Fields that the model does not know are not printed; invalid ones raise an exception.

usage: python grafana_model.py FILE
"""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def main() -> None:
    register_default_plugins()
    dashboard = Dashboard.from_json(json.loads(Path(sys.argv[1]).read_text()))
    print(JSONEncoder(sort_keys=True).encode(dashboard))


if __name__ == "__main__":
    main()
