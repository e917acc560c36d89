"""Makes a token-classification data set of plain sentences: which words had a capital or a comma.

    python examples/capitals.py TABLE COLUMN OUT.jsonl.gz

reads a column of any table that ``data.train`` takes. A row of the result has ``tokens``, the words
in lower case without punctuation, and ``tags``: ``B-CAPITAL``, ``B-COMMA`` (one stood behind the
word), ``B-BOTH`` or ``O``. The first word of a sentence is always a capital, so that says nothing
and is left out. In German, where every noun has one, this asks for parts of speech and clauses.
"""

from __future__ import annotations

import gzip
import json
import re
import sys

from collapipe_flwr.data.files import load_table
from collapipe_flwr.data.reader import read_column

_SHORTEST = 3  # words
_AROUND = re.compile(r"^\W+|\W+$")
_NAMES = {(False, False): "O", (True, False): "B-CAPITAL", (False, True): "B-COMMA"}


def tagged(sentence: str) -> tuple[list[str], list[str]]:
    """The words of a sentence and the tag of each."""
    found = [(_AROUND.sub("", raw), raw) for raw in sentence.split()]
    words = [(word, raw) for word, raw in found if word]
    tags = [
        _NAMES.get((place > 0 and word[0].isupper(), raw.endswith(",")), "B-BOTH")
        for place, (word, raw) in enumerate(words)
    ]
    return [word.lower() for word, _ in words], tags


def main(table: str, name: str, out: str) -> None:
    """Write the data set."""
    sentences = read_column(
        load_table(table, key="TABLE", split="train"), name, key="COLUMN", of=table
    )
    with gzip.open(out, "wt", encoding="utf-8") as file:
        for tokens, tags in map(tagged, sentences):
            if len(tokens) >= _SHORTEST:
                row = {"tokens": tokens, "tags": tags}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
