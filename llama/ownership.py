"""Who may use a model, whose cache holds one text: a generation at a time, and of it the one call that it makes.

Knows threads, calls and processes; does not know what a model or a cache is.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch


class Ownership:
    """Held by one generation, or by one call; all others get a RuntimeError.

    Calls that share nothing but weights may run beside each other. A generation may go on in another thread than the
    one that began it, as web servers let it. A thread may keep it over several of either. A copy, and what comes out of
    a pickle, is held by nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.fed = False  # whether its model has fed layers, which others may share
        self._process = os.getpid()  # the one that made the model
        self._generating = False
        self._acting: threading.Thread | None = None  # the thread that acts for the generation now
        self.undisturbed = False  # whether, since the call before, no code ran but that of the generation
        self._calling = False
        self._sharing = 0  # how many calls that share nothing but weights
        self._keeper: threading.Thread | None = None  # the thread that keeps it over many calls and generations
        self._keeps = 0  # how many blocks keep it
        self._began: threading.Thread | None = None  # the thread whose text the cache holds, where calls made it
        self._replaced: WeakSet[threading.Thread] = WeakSet()  # threads whose texts another thread has replaced

    def __reduce__(self) -> tuple[type["Ownership"], tuple[()]]:
        return Ownership, ()

    @property
    def generating(self) -> bool:
        """Whether a generation holds it."""
        return self._generating

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it for a generation."""
        held = False
        try:
            with self._lock:
                if self._generating:
                    raise RuntimeError(
                        "this model is in the middle of another generation, which owns its cache; "
                        "finish or close that stream first"
                    )
                self._check()
                held = self._generating = True
            yield
        finally:
            if held:
                self._generating = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep it to this thread for what stands under `with`: calls and generations that belong together."""
        with self._lock:
            self._check()
            self._keeper, self._keeps = threading.current_thread(), self._keeps + 1
        try:
            yield
        finally:
            with self._lock:
                self._keeps -= 1
                if not self._keeps:
                    self._keeper = None

    def keep_here(self) -> None:
        """Let a block that goes on, or ends, in another thread keep it to that one."""
        if self._keeps:
            self._keeper = threading.current_thread()

    @contextmanager
    def acting(self, *, undisturbed: bool = False) -> Iterator[None]:
        """Let this thread act for the generation: change what it needs, or make one call.

        `undisturbed` says that no code but the generation's ran since its last call.
        """
        self._acting, self.undisturbed = threading.current_thread(), undisturbed
        try:
            yield
        finally:
            self._acting, self.undisturbed = None, False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change a setting or the cache, while no generation and no call of another owner is under way."""
        with self._lock:
            self._check()
            yield

    @contextmanager
    def call(self, *, shared: Callable[[], bool], begins: bool) -> Iterator[None]:
        """Hold it for one call. `shared()`: the call touches no cache; `begins`: it begins a text in the cache."""
        held = shares = False
        self._check_process()
        try:
            with self._lock:
                if not self._generating and not self._calling and not self._kept_by_another() and shared():
                    shares = True
                    self._sharing += 1
                else:
                    self._check()
                    if not self._generating:
                        self._note_text(begins)
                    self._acting = None  # one call: what its hooks do is not the generation's
                    held = self._calling = True
            yield
        finally:
            if held:
                self._calling = False  # first, and without waiting: an interrupt may come at any line
            if shares:
                with self._lock:
                    self._sharing -= 1

    def _check(self) -> None:
        """Raise RuntimeError unless it is free, or this thread acts for the generation that holds it."""
        if self._generating and self._acting is not threading.current_thread():
            raise RuntimeError(
                "this model is in the middle of a generation, which owns its cache; finish or close that stream first"
            )
        if not self._generating and self._kept_by_another():
            raise RuntimeError(
                "another thread keeps this model's cache and its switch as they are for several generations, as a "
                "recording or a comparison does; wait for it, or give each thread a model of its own"
            )
        if self._calling or self._sharing:
            raise RuntimeError(
                "this model is in the middle of another call, which needs its cache and its switch as they are; "
                "wait for it, or give each thread a model of its own"
            )

    def _kept_by_another(self) -> bool:
        return self._keeper not in (None, threading.current_thread())

    def _check_process(self) -> None:
        """Refuse what would hang: threads of a computation do not live on in a forked process."""
        if self._process != os.getpid() and torch.get_num_threads() > 1:
            raise RuntimeError(
                "this process was forked from the one that made the model, and a fork does not copy PyTorch's threads: "
                "computing would wait for them for ever; call torch.set_num_threads(1) here first, or start processes "
                "by spawn"
            )

    def _note_text(self, begins: bool) -> None:
        """Refuse to go on with a text that another thread has replaced by its own."""
        me = threading.current_thread()
        if begins:
            if self._began not in (None, me):
                self._replaced.add(self._began)
            self._replaced.discard(me)
            self._began = me
        elif me in self._replaced:
            raise RuntimeError(
                "another thread has begun a text of its own in this model's cache, in the place of this thread's; "
                "feed the text again from start_pos=0, or give each thread a model of its own"
            )
