"""The other engines that are measured: their packages, and the models that only they run."""

from typing import Any

PEERS = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # each with its package

# The GPT-2 models of the teaching notebooks, as changes of GPT2Config, which is that of the smallest.
GPT2: dict[str, dict[str, int]] = {
    "gpt2": {},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "distilgpt2": {"n_layer": 6},
}


def check_engine(engine: str) -> Any:
    """Return an engine's module. Raises ValueError if its name is unknown or its package is not installed."""
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
