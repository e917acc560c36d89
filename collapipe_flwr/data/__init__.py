"""Tasks, their examples, tokenizer, partitions and metrics: all that a control unit feeds."""
