"""Record a generation and write its page, and say meanwhile how far it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from llama.cli.progress import progress_bar
from llama.host.files import keep_file
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
    """Write the page of a generation, as a whole, and return in a line what it shows.

    `name` is what the page calls the model; the rest as in `record`. Raises ValueError, and OSError where the file
    cannot be written; the page is then where `keep_file` has put it.
    """
    with progress_bar("recording", unit="step") as bar:
        recording = record(model, tokenizer, prompt, max_gen_len, stop=stop, progress=bar.update, **options)
    content = page(recording, model=name).encode()
    keep_file(path, content)
    return f"{path}: {len(recording.moments)} steps to look at, {len(content) / 1024:,.0f} kB; open it in a browser"
