"""Check on a fresh SQLite that the Alembic revisions build exactly the schema of the store's models."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite:///{directory}/check.db"
        for command in (["upgrade", "head"], ["check"]):
            result = subprocess.run([sys.executable, "-m", "alembic", "-x", f"url={url}", *command], cwd=ROOT)
            if result.returncode != 0:
                raise SystemExit(result.returncode)


if __name__ == "__main__":
    main()
