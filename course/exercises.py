"""The exercises: what each removes from the sources, its task, its mistakes, and what its submissions are tried with.

An exercise is a value; making, running and grading are the same for all (course/make.py, sandbox.py, grade.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from course.diagnose import Facts, Finding, diagnose, explain
from course.holes import HOLES, Hole, keep_signature, leave_out, whole
from course.mistakes import MISTAKES, Mistake
from course.trials import eviction, int8, lookup, truncate

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Exercise:
    """An exercise.

    kit: the files of course/kit/ that it gets begin with one of these. more: files that a student needs besides those
    of the scripts. mistakes: those that the grader knows. explain: finds them, by the facts of a submission and those
    of the real package. trials: the file that a submission is tried with; None: course/probe.py alone.
    """

    name: str
    holes: tuple[Hole, ...]
    task: Path
    kit: tuple[str, ...]
    mistakes: Mapping[str, Mistake]
    explain: Callable[[Facts, Facts], list[Finding]]
    more: tuple[str, ...] = ()
    trials: str | None = None

    @property
    def title(self) -> str:
        return self.task.read_text("utf-8").partition("\n")[0]

    def arguments(self, *, versions: bool = False) -> list[str]:
        """Return the arguments of the probe; with `versions`, versions of the answer with a mistake are tried, too."""
        return [] if self.trials is None else [self.trials, *["versions"] * versions]


def _exercise(module: ModuleType, *holes: Hole, more: tuple[str, ...] = ()) -> Exercise:
    name = module.__name__.rpartition(".")[2]
    own = {mistake: Mistake(mistake, *about) for mistake, about in module.MISTAKES.items()}
    mistakes = {shared: MISTAKES[shared] for shared in ("todo-left", "raises", "unknown")} | own
    kit = ("llama/fast/", "llama/exact/")
    return Exercise(name, holes, HERE / "tasks" / f"{name}.md", kit, mistakes, explain, more, module.__file__)


def _todo(file: str, function: str, number: int, words: str) -> Hole:
    return Hole(file, function, whole, keep_signature, number, words)


def _removed(file: str, function: str) -> Hole:
    return Hole(file, function, whole, leave_out)


SESSION, QUANTIZED, PUBLISHED = "llama/texts/session.py", "llama/kv_cache/quantized.py", "llama/kv_cache/published.py"
SPECULATION, ORACLE = "llama/speculation.py", ("llama/testing.py",)
CACHE = Exercise("cache", HOLES, HERE / "kit" / "TASK.md", ("",), MISTAKES, diagnose)
TRUNCATE = _exercise(
    truncate,
    _todo(SESSION, "Session._begin", 1, "from which position on does the text have to be fed, up to `end`?"),
    _todo(SESSION, "Session._cut", 2, "the text ends at `position` now. What is no longer true?"),
)
INT8 = _exercise(
    int8,
    _todo(QUANTIZED, "quantize", 1, "find each row's scale and zero, and round every number to a code."),
    _todo(QUANTIZED, "dequantize", 2, "return the numbers that the codes stand for."),
    *(_removed(QUANTIZED, name) for name in ("_steps", "_unbiased")),
    more=ORACLE,
)
EVICTION = _exercise(
    eviction,
    _todo(PUBLISHED, "H2OCache.score", 1, "how much attention has each key received in this call?"),
    _todo(PUBLISHED, "H2OCache.choose", 2, "which `budget` keys of each head stay?"),
    more=ORACLE,
)
LOOKUP = _exercise(
    lookup,
    _todo(SPECULATION, "Lookup.propose", 1, "what followed the newest tokens when they occurred last?"),
    _removed(SPECULATION, "Lookup.__init__"),
)
EXERCISES = {one.name: one for one in (CACHE, TRUNCATE, INT8, EVICTION, LOOKUP)}


def named(name: str) -> Exercise:
    """Return an exercise by its name. Raises ValueError."""
    if name not in EXERCISES:
        raise ValueError(f"exercise={name!r} is not known; known are {', '.join(EXERCISES)}")
    return EXERCISES[name]
