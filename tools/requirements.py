"""Prints what pyproject.toml asks for: `requirements.py build demo test` for these groups, torch never among them."""

import re
import sys
from pathlib import Path


def main() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for group in sys.argv[1:]:
        if group == "build":
            wanted = re.search(r"^requires = \[(.*?)\]", text, re.M | re.S).group(1) + ', "ninja"'
        else:
            wanted = re.search(rf"^{group} = \[(.*?)\]", text, re.M | re.S).group(1)
        print(*re.findall(r'"([^"]+)"', wanted), sep="\n")


if __name__ == "__main__":
    main()
