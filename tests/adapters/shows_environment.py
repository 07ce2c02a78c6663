"""In place of the process that renders a template: says which environment variables it has."""

import json
import os

print(json.dumps({"unreadable": " ".join(os.environ)}))
