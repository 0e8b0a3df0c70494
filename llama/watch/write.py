"""Record a generation and write its page, with a progress bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from llama.cli.progress import progress_bar
from llama.host.files import replace_file
from llama.model import Transformer
from llama.request import Options
from llama.streaming import TextCodec
from llama.watch.page import page
from llama.watch.record import record


def write_page(
    path: Path,
    model: Transformer,
    tokenizer: TextCodec,
    prompt: str | Sequence[int],
    max_gen_len: int = 64,
    *,
    name: str = "a Llama model",
    stop: str | Sequence[str] = (),
    **options: Unpack[Options],
) -> str:
    """Write the page of a generation, and return one line about it.

    `name` is the model's name on the page; the rest as in `record`. Raises ValueError as `record` does, and OSError if
    the file cannot be written.
    """
    with progress_bar("recording", unit="step") as bar:
        recording = record(model, tokenizer, prompt, max_gen_len, stop=stop, progress=bar.update, **options)
    content = page(recording, model=name).encode()
    replace_file(path, content)
    return f"{path}: {len(recording.moments)} steps, {len(content) / 1024:,.0f} kB; open it in a browser"
