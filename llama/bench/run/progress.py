"""A progress bar in seconds, which knows what remains: every piece moves it as far as it was expected to take."""

import sys
import time

from tqdm import tqdm


class Progress:
    """Draws on a terminal only. `plan` says how many seconds are expected in all, `begin` what comes next."""

    def __init__(self) -> None:
        self._bar = tqdm(total=1.0, disable=None, leave=False, bar_format="{desc} |{bar}| {elapsed}{postfix}")
        self._started = time.monotonic()
        self._end = self._piece_end = self._started

    def plan(self, seconds: float) -> None:
        """Expect that all that is left takes so many seconds from now."""
        self._end = time.monotonic() + seconds
        self.tick()

    def begin(self, what: str, expected: float) -> None:
        """Name the piece that runs now; where it takes longer than expected, so does everything."""
        self._bar.set_description_str(what, refresh=False)
        self._piece_end = time.monotonic() + expected
        self.tick()

    def tick(self) -> None:
        """Draw the bar as of now."""
        now = time.monotonic()
        if now > self._piece_end:  # late: what comes after is pushed back
            self._end, self._piece_end = max(self._end, now) + (now - self._piece_end), now
        self._bar.total = max(self._end, now) - self._started + 1e-9
        self._bar.n = min(now - self._started, self._bar.total)
        left = max(0.0, self._end - now)
        self._bar.set_postfix_str(f"about {left // 60:.0f}:{left % 60:02.0f} left", refresh=False)
        self._bar.refresh()

    def say(self, words: str) -> None:
        """Print a line over the bar."""
        tqdm.write(words, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
