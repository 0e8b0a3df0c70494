"""Run tasks in threads."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*tasks: Callable[[], Any]) -> list[Any]:
    """Run all tasks at the same time; return each result or exception."""
    results: list[Any] = [None] * len(tasks)
    start = threading.Barrier(len(tasks))

    def run(place: int, task: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[place] = task()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=numbered) for numbered in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def elsewhere(task: Callable[[], Any]) -> Any:
    """Run a task in another thread; return its result or raise its exception."""
    (result,) = in_threads(task)
    if isinstance(result, Exception):
        raise result
    return result
