"""The mistakes of the first exercise: what each is called, what it costs, and a hint that is not the answer.

Knows words and points; course/diagnose.py recognises the mistakes: a new one needs a row here and a rule there. The
other exercises share `Mistake` and the names `todo-left`, `raises` and `unknown`; theirs are in course/trials/.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """One mistake. points: what it costs, of 100. hint: a question or an experiment that leads to it."""

    name: str
    points: int
    title: str
    hint: str


# Each mistake has a line with its name, points and title. The indented lines after it are its hint.
TABLE = """\
# nothing to judge
todo-left 100 A TODO of the task is still there
    Search the folder for TODO; TASK.md says what belongs in each place.
loop-todo-left 40 The TODO of the decode loop is still there
    Which tokens has the model not seen yet when a step begins?
# which token's key and value stand where
index-late 40 The newest key and value are written after their position, and not attended to in their own step
    Write down by hand which slots the prompt takes, and which slot the next token takes.
index-early 40 The newest key and value overwrite those of the token before it
    Of a prompt of 5 tokens the last one stands at 4. Where does the next token stand?
index-zero 40 Every call writes from position 0 on, over the beginning of the text
    update is given rows. What is rows.starts used for in your code?
wrong-axis 40 What is written or joined does not fit: a wrong axis, or a slice of another length
    Name the four axes of xk in a comment, then name the axis of each slice of your buffer.
rows-mixed 40 A row attends to tokens of another row
    Rows never meet in attention. On which axis do you write and read?
first-row-only 40 The first row is right, the others are not: only one row is kept
    Try a batch of two different prompts and print the cache of row 1.
shared-by-layers 40 A layer finds the values of another layer: all layers share one cache
    How many caches does a model with 2 layers need? Where is yours made?
swapped 40 Keys and values are swapped
    attend(xq, keys, values, ...): compare the order with what update returns.
values-forgotten 40 The values of past tokens are not stored
    Attention takes weights from keys, and then adds up what?
keys-forgotten 40 The keys of past tokens are not stored: all old tokens get the same attention
    Print the keys that attention is given in the second step.
past-ignored 40 A step attends to its own tokens only: the cached ones are not used
    What does attention get as keys in a step, and how long is it?
newest-hidden 40 A token does not see itself: what is returned ends before the newest key
    After 5 tokens and one more, how many keys must update return?
unwritten-read 40 Attention reads slots that were never written
    The buffer is longer than the text. Where does the text end?
heads-order 30 Query heads attend to the wrong KV head
    With 6 query heads and 2 KV heads, the heads 0, 1 and 2 share the first one. Compare repeat and repeat_interleave.
raises 40 A call ends in an error
    Run inference.py --debug: its last lines name the place.
# masks
mask-forgotten 20 In a chunk of several tokens, a token sees those after it
    Feed 4 tokens, then 4 more in one call. Which keys may the first of these look at?
mask-at-first-key 20 The mask of a later chunk begins at the first key, so its tokens see almost none of the past
    is_causal puts query 0 beside key 0. Where does query 0 of a later chunk stand?
# RoPE
rope-start-ignored 30 RoPE turns new tokens as if each call began at position 0
    Which position has the token that is fed alone, and which angle does it get?
rope-twice 30 Keys are rotated twice
    A key is rotated once in its life. Is what you store rotated already? What is done when it is read?
rope-missing 30 Keys come out of the cache without their own rotation
    Compare the cached and the uncached keys of one layer, number by number.
rope-wrong 30 Keys or queries are rotated by wrong positions
    Print the positions by which queries and keys of one step are rotated.
# batches, texts, limits
rows-at-one-position 15 Rows of different lengths are not kept at their own positions
    rows.starts has one position per row: feed prompts of 3 and 5 tokens together.
stale-text 15 A new text, from position 0 on, still finds the one before it in the cache
    rows says the positions of each call: which keys may be used after a call whose rows start at 0?
own-counter 10 A text that goes back to an earlier position continues at the old one: the cache counts by itself
    There is nothing to count: rows.starts says where the new keys belong.
rows-do-not-grow 10 A batch with more rows than the one before does not work
    The first text had one row, the next has two. Which size has your buffer?
rows-not-moved 15 When a row has ended and left the batch, the others continue with keys and values of other rows
    Read what select_rows does. Where do you keep what it has to move?
length-does-not-grow 10 A text that is longer than the reserved length, or has none, does not work
    reserve says what is expected. The limit is max_seq_len.
overflow-silent 10 A token past max_seq_len is dropped or written elsewhere without an error
    What does PyTorch do with a slice that begins behind the end? Try it with one token.
limits-ignored 5 A text or batch beyond the limits is not refused by ValueError, or one within them is
    ModelArgs has a method that raises it with a message: check_room.
# the loop
cached-fed-prefix 30 With the cache on, each step feeds the whole text again: right, but nothing is saved
    Run inference.py --trace: how many tokens should a step feed with the cache on?
cached-fed-wrong 30 With the cache on, a step feeds other tokens than the newest one of each row
    Run inference.py --trace and compare prev_pos and cur_pos with the text.
uncached-fed-newest 30 With the cache off, a step feeds only the newest token, at prev_pos
    Without a cache the model remembers nothing. What must it be fed?
uncached-changed 20 With the cache off, the model no longer computes what it did
    Compare with the folder as you got it: --kv_caching=False worked there.
# the switch
switch-first-layer 15 Switching the cache off does not reach all layers
    Print kv_caching of every layer after model.kv_caching = False.
switch-not-put-back 10 kv_caching=False for one call stays set after it
    What runs when a call ends by an error? Look for finally.
written-while-off 10 With the cache off, the cache is still written or uses memory
    The switch guards reading. What guards writing?
# memory
kept-after-generation 10 The cache's memory is not freed after a generation
    A generation drops its cache. What else refers to your tensors: a class, a module, the model?
kept-after-error 10 The cache's memory is not freed after a generation that failed
    Which lines run when on_step raises, or the user presses Ctrl-C?
wrong-dtype 10 The cache has another dtype than the model computes in
    torch.zeros has a dtype of its own choice. Which one has xk?
heads-expanded 10 Keys and values are stored once per query head: right, but several times the bytes
    Grouped-query attention is there to make the cache small. When must the heads be repeated?
limits-sized 5 Memory is allocated for the limits, not for the reserved length
    self.reserved says how many rows and positions are needed.
gradients-kept 10 The cache keeps the graph of gradients, so memory grows with each call
    self.check refuses this. Otherwise: which tensors remember how they were computed?
unknown 30 What was observed is not right, and the grader has no name for its cause
    Try yourself what was observed, and find the first number that differs.
# the report
report-missing 20 report.md is not there, or its table is not filled in
    python benchmark_inference.py --preset table measures, with --resume --budget 0 also what a budget left out. Then
    python fill_report.py writes the table.
"""


def _mistakes(table: str) -> Iterator[Mistake]:
    for entry in re.findall(r"^[^#\s].*(?:\n .*)*", table, flags=re.MULTILINE):
        head, *hint = entry.splitlines()
        name, points, title = head.split(" ", 2)
        yield Mistake(name, int(points), title, " ".join(map(str.strip, hint)))


MISTAKES = {mistake.name: mistake for mistake in _mistakes(TABLE)}
