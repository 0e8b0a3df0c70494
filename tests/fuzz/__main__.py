"""`python -m tests.fuzz --minutes N [--parser NAME]`: see driver.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]
    from fuzz.driver import main

    main(sys.argv[1:])
