"""`python tests/fuzz`: see `cli`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.cli import main

sys.exit(main())
