"""The types of numbers in a .gguf file: their codes in a header, and the size of their blocks."""

# Name of the type -> the numbers in a block, and the bytes of a block.
FILE_BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
NAMES = {
    **{0: "F32", 1: "F16", 30: "BF16"},
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
}
FLOATS = ("F32", "F16", "BF16")
