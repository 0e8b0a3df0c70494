"""GPT-2's letters for bytes, in which byte-level vocabularies are written.

Source: https://github.com/openai/gpt-2, src/encoder.py.
"""


def byte_letters() -> list[str]:
    """Return the letter of each byte: a printable byte is itself, the others are U+0100 and onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
