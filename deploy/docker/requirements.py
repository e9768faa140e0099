"""Prints what an image has to install beside kvrelay itself: its dependencies, and those of the extras named.

Run: python requirements.py [--without NAME] EXTRA...
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Reads the pyproject.toml of the working directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave this package out")
    arguments = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in arguments.extras:
        wanted += project["optional-dependencies"][extra]
    for each in wanted:
        match = re.match(r"[A-Za-z0-9._-]+", each)
        if match is not None and match[0] not in arguments.without:
            sys.stdout.write(f"{each}\n")


if __name__ == "__main__":
    main()
