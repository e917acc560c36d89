"""Makes conversations of texts and labels: a question about each text, answered by its label.

    python examples/labels_as_chat.py TABLE TEXT LABEL QUESTION OUT.jsonl

reads two columns of any table that ``data.train`` takes. A row of the result has ``prompt`` (the
question, a line break, the text) and ``completion`` (the label in words: ``card_arrival`` becomes
"card arrival"), as the task ``instruct`` reads them, and keeps the column of labels, by which
``data.partition-column`` can part the rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from collapipe_flwr.data.files import load_table
from collapipe_flwr.data.reader import read_column


def main(table: str, text: str, label: str, question: str, out: str) -> None:
    """Write the conversations."""
    loaded = load_table(table, key="TABLE", split="train")
    columns = [read_column(loaded, name, key="COLUMN", of=table) for name in (text, label)]
    with Path(out).open("w", encoding="utf-8") as file:
        for asked, answer in zip(*columns, strict=True):
            words = str(answer).replace("_", " ")
            row = {"prompt": f"{question}\n{asked}", "completion": words, label: answer}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
