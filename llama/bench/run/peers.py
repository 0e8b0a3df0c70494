"""The peers that the benchmark puts beside us: their names, their packages, and the models that only they run.

How each is driven, a file of its own knows. A package is imported when it is asked for, and not before.
"""

from typing import Any

PEERS = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # each with the package that it is in

# The GPT-2 models of the teaching notebooks, each with what makes its config out of GPT2Config, that of the smallest.
GPT2: dict[str, dict[str, int]] = {
    "gpt2": {},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "distilgpt2": {"n_layer": 6},
}


def check_engine(engine: str) -> Any:
    """Return an engine's package; raise ValueError for a name that is not in PEERS, and where it is not installed."""
    if engine not in PEERS:
        raise ValueError(f"engine={engine!r} is not known; the peers are {' and '.join(PEERS)}")
    try:
        if engine == "transformers":
            import transformers

            return transformers
        import llama_cpp
    except ModuleNotFoundError as error:
        remedy = 'pip install -c constraints.txt -e ".[peers]"'
        raise ValueError(f"--engine {engine} needs {PEERS[engine]}, which is not installed: {remedy}") from error
    return llama_cpp
