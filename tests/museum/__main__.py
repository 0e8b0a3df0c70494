"""`python -m tests.museum`: open every exhibit and print, a line of JSON each, what came of it.

`python -m tests.museum --peers` prints the table of docs/security.md: what other libraries do with each.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]
    if "--peers" in sys.argv[1:]:
        from museum.peers import print_table

        print_table()
    else:
        from museum.measure import visits

        for seen in visits():
            print(json.dumps(asdict(seen)), flush=True)
