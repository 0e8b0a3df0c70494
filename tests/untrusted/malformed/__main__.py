"""`python -m tests.untrusted.malformed`: open every malformed checkpoint and print the result, a line of JSON each."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[2]
    sys.path[:0] = [str(tests), str(tests / "support")]
    from untrusted.malformed.measure import results

    for slow in (False, True):
        for result in results(slow=slow):
            print(json.dumps(asdict(result)), flush=True)
