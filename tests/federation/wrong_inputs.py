"""Wrong inputs of a run, each with what its sentence must say: the key, and the way out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import BertConfig

from collapipe_flwr.core.keys import Value

ROWS = "".join(f"text number {i},{'ab'[i % 2]}\n" for i in range(40))
TINY = (
    "hidden_size=16 num_hidden_layers=4 num_attention_heads=2 intermediate_size=24 "
    "max_position_embeddings=64"
)
TEXTS: Mapping[str, Value] = {
    "data.task": "classification",
    "data.train": "good.csv",
    "data.test-examples": 4,
    "model.type": "bert",
    "model.overrides": TINY,
    "world.memory-share": 0.01,
    "train.examples-per-round": 20,
}
TAGS: Mapping[str, Value] = {
    **TEXTS,
    "data.task": "token-classification",
    "data.train": "good.conll",
}
Wrong = tuple[dict[str, Value], str, str]  # overrides, the key, the way out


def write_files(folder: Path) -> None:
    """The good and the bad files that the overrides name."""
    texts = {
        "good.csv": f"text,label\n{ROWS}",
        "good.conll": "Anna B-PER\nruns O\n\n" * 40,
        "utf8.conll": "Anna B-PER\n\n",
        "empty.csv": "",
        "head.csv": "text,label\n",
        "one.csv": "text,label\nhello,a\n",
        "twice.csv": "text,text\nhello,a\n",
        "wide.csv": "text,label\nhello,a,b\n",
        "onelabel.csv": "text,label\n" + "hi,a\n" * 30,
        "fraction.csv": "text,label\n" + "hi,0.5\nho,1.5\n" * 30,
        "notext.csv": f"text,label\n{ROWS},a\n",
        "nolabel.csv": f"text,label\n{ROWS}hi,\n",
        "pictures.csv": "image,label\n" + "a.png,x\na.png,y\n" * 10,
        "semicolons.csv": ROWS.replace(",", ";").join(("text;label\n", "")),
        "tabs.csv": ROWS.replace(",", "\t").join(("text\tlabel\n", "")),
        "nohead.csv": ROWS,
        "quote.csv": f'text,label\n{ROWS}"never closed,a\n{ROWS}',
        "commas.csv": f"text,label\n{ROWS}well, well,a\n",
        "kinds.jsonl": '{"text": "x", "label": 1}\n{"text": "y", "label": "1"}\n' * 20,
        "rounded.jsonl": '{"text": 12345678901234567890, "label": "x"}\n' * 20,
        "unique.csv": "text,label\n" + "".join(f"a,{i}x\n" for i in range(20)),
        "newlabel.csv": "text,label\nhello,zzz\n",
        "bad.json": '{"text": "a", ',
        "bad.parquet": "nonsense",
        "bad.csv.gz": "nonsense",
        "table.xlsx": "nonsense",
        "notag.conll": "Anna B-PER\nruns\n\n" * 4,
        "onetag.conll": "Anna O\nruns O\n\n" * 40,
        "newtag.conll": "Anna B-ORG\n\n" * 4,
        "universal.conll": "# text = Anna\nAnna B-PER\n\n" * 4,
        "large.toml": "client-resources-num-cpus = 64\ninit-args-num-cpus = 2\n",
        "typo.toml": "num-supernode = 2\n",
        "torn.toml": "num-supernodes = \n",
        "text.toml": 'num-supernodes = "two"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    rows = [{"tokens": ["a", "" if i == 3 else "b"], "tags": ["O", "B-X"]} for i in range(40)]
    (folder / "emptyword.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rows = [{"tokens": ["a", "b"], "tags": ["O", "B-X"][: 1 + i % 7]} for i in range(40)]
    (folder / "fewtags.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Image.new("L", (4, 4)).save(folder / "a.png")
    (folder / "latin.csv").write_bytes(f"text,label\n{ROWS}".encode() + b"caf\xe9,a\n")
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9", "label": "a"}\n' * 20)
    (folder / "packed.csv").write_bytes(gzip.compress(f"text,label\n{ROWS}".encode()))
    (folder / "utf16.csv").write_bytes(f"text,label\n{ROWS}".encode("utf-16"))
    for name in ("folder", "checkpoint", "torn", "t5"):
        (folder / name).mkdir()
    (folder / "torn" / "config.json").write_text("{")
    (folder / "words").mkdir()
    (folder / "words" / "config.json").write_text('{"model_type": "bert", "hidden_size": "big"}')
    for name in ("weightless", "corrupt", "cut", "pickled", "shardless"):
        BertConfig(num_hidden_layers=4).save_pretrained(folder / name)
    save_file({"x": torch.zeros(99)}, folder / "cut" / "model.safetensors")
    whole = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[:-9])
    (folder / "corrupt" / "model.safetensors").write_bytes(b"nonsense" * 99)
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"nonsense" * 99)
    shards = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (folder / "shardless" / "model.safetensors.index.json").write_text(json.dumps(shards))


DATA: list[Wrong] = [
    ({"data.train": "nope.csv"}, "data.train", "correct the path"),
    ({"data.task": "number-words"}, "data.train", "set data.task to the task of your data"),
    ({"data.train": "~/nope/rows"}, "data.train", "correct the path"),
    ({"data.train": "~nobody-here/rows"}, "data.train", "correct the path"),
    ({"data.train": "folder/rows"}, "data.train", "correct the path"),
    ({"data.train": "a/b/c"}, "data.train", "correct the path"),
    ({"data.train": "table.xlsx"}, "data.train", "use one of .csv"),
    ({"data.train": "folder"}, "data.train", "give a local CSV or JSON file"),
    ({"data.train": ""}, "data.train", "name a CSV or JSON file"),
    ({"data.train": "latin.csv"}, "data.train", "save the file as UTF-8"),
    ({"data.train": "utf16.csv"}, "data.train", "save the file as UTF-8"),
    ({"data.train": "empty.csv"}, "data.train", "give a file with a line of column names"),
    ({"data.train": "head.csv"}, "data.train", "has no rows): give a file with examples"),
    ({"data.train": "one.csv"}, "data.label-column", "needs at least two"),
    ({"data.train": "twice.csv"}, "data.train", "give each column its own name"),
    ({"data.train": "wide.csv"}, "data.train", "give every field a name"),
    ({"data.train": "onelabel.csv"}, "data.label-column", "needs at least two"),
    ({"data.train": "fraction.csv"}, "data.label-column", "write classes as names"),
    ({"data.train": "notext.csv"}, "data.text-column", "in row 41; correct or remove them"),
    ({"data.train": "nolabel.csv"}, "data.label-column", "data.skip-bad-rows=true"),
    ({"data.train": "bad.json"}, "data.train", "write one object per line"),
    ({"data.train": "bad.parquet"}, "data.train", "save it again in the format"),
    ({"data.train": "semicolons.csv"}, "data.train", "separated by commas"),
    ({"data.train": "tabs.csv"}, "data.train", "by tabs in .tsv"),
    ({"data.train": "nohead.csv"}, "data.text-column", "put a line of column names first"),
    ({"data.train": "quote.csv"}, "data.train", "close the quotation mark"),
    ({"data.train": "commas.csv"}, "data.train", "in quotation marks"),
    ({"data.train": "kinds.jsonl"}, "data.label-column", "write all of them as texts"),
    ({"data.train": "rounded.jsonl"}, "data.text-column", "write them as texts"),
    ({"data.train": "latin.jsonl"}, "data.train", "save the file as UTF-8"),
    ({"data.train": "unique.csv"}, "data.label-column", "name the column of the classes"),
    ({"data.label-column": "text"}, "data.label-column", "name another column"),
    ({"data.vocab-size": 10**9}, "data.vocab-size", "must lie between 260 and 1000000"),
    ({"data.target-language": "ro_RO"}, "data.target-language", "leave it empty"),
    ({"data.train": "bad.csv.gz"}, "data.train", "packed by gzip"),
    ({"data.train": "packed.csv"}, "data.train", "such as .csv.gz"),
    ({"data.test": "newlabel.csv"}, "data.test", "add training examples of them"),
    ({"data.test": "good.csv"}, "data.test", "leave data.test empty"),
    ({"data.test": "nope/x.csv"}, "data.test", "correct the path"),
    ({"data.test-examples": 40}, "data.test-examples", "give more rows"),
    ({"data.text-column": "words"}, "data.text-column", "which has text, label"),
    ({"data.label-column": "mood"}, "data.label-column", "which has text, label"),
    ({"data.label-names": "x"}, "data.label-names", "give one for every number"),
    ({"data.partition-column": "who"}, "data.partition-column", "which has text, label"),
    ({"data.partition": "by-hand"}, "data.partition", "must be one of auto, natural"),
    ({"data.stream": "incoming"}, "data.stream", "make it"),
    ({"data.vocab-size": 10}, "data.vocab-size", "must lie between 260"),
    ({"data.max-source-length": 100}, "data.max-source-length", "=64, or raise max_position"),
    ({"data.tokenizer": "./nope"}, "data.tokenizer", "give the directory of a saved tokenizer"),
    ({"data.tokenizer": "weightless"}, "data.tokenizer", "holds no tokenizer: give the directory"),
    ({"data.tokenizer": "checkpoint"}, "data.tokenizer", "give the directory of a saved"),
    ({"data.task": "translation"}, "data.source-column", "which has text, label"),
    ({"data.task": "image-classification"}, "data.image-column", "which has text, label"),
    (
        {"data.task": "image-classification", "data.image-column": "text"},
        "data.image-column",
        "correct or remove them",
    ),
    (
        {"data.task": "image-classification", "data.train": "pictures.csv"},
        "model.type",
        "choose one that does, such as vit",
    ),
    (
        {"evaluation.federated": True, "data.test-examples": 1},
        "data.test-examples",
        "or set evaluation.federated to false",
    ),
]
TAGGED: list[Wrong] = [
    ({"data.train": "notag.conll"}, "data.train", "in lines 2, 5, 8 and 11: write a word and its"),
    ({"data.train": "emptyword.jsonl"}, "data.tokens-column", "in row 4; correct or remove"),
    ({"data.train": "fewtags.jsonl"}, "data.tags-column", "data.skip-bad-rows=true"),
    ({"data.train": "onetag.conll"}, "data.tags-column", "at least two are needed"),
    ({"data.train": "universal.conll"}, "data.train", "write a word and its tag in every line"),
    ({"data.train": "good.csv"}, "data.tokens-column", "which has text, label"),
    ({"data.test": "newtag.conll"}, "data.test", "add training examples of it"),
]
MODELS: list[Wrong] = [
    ({"model.type": "gpt2"}, "model.overrides", "were made for another type"),
    ({"model.type": "martian"}, "model.type", "did you mean 'marian'"),
    ({"model.overrides": "hidden_siz=3"}, "model.overrides", "did you mean 'hidden_size'"),
    ({"model.overrides": "hidden_size=-32"}, "model.overrides", "hidden_size=-32 should be above"),
    ({"model.overrides": "hidden_act=zip"}, "model.overrides", "'zip'"),
    ({"model.overrides": "hidden_size=17"}, "model.overrides", "not a multiple"),
    ({"model.overrides": "hidden_size=abc"}, "model.overrides", "expected int"),
    ({"model.overrides": "hidden_size"}, "model.overrides", "must read like"),
    ({"model.edge-blocks": 9}, "model.edge-blocks", "must be below the model's 4 blocks"),
    ({"model.ties": "knot"}, "model.ties", "must be one of untie, rows"),
    ({"model.pretrained": "./nope"}, "model.pretrained", "correct the path"),
    ({"model.pretrained": "folder/nope"}, "model.pretrained", "correct the path"),
    ({"model.pretrained": "checkpoint"}, "model.pretrained", "give a folder with config.json"),
    ({"model.pretrained": "torn"}, "model.pretrained", "give a folder with config.json"),
    ({"model.pretrained": "cut/config.json"}, "model.pretrained", "is a file: name its folder"),
    ({"model.pretrained": "weightless"}, "model.pretrained", "copy the whole folder"),
    ({"model.pretrained": "corrupt"}, "model.pretrained", "cannot read the checkpoint"),
    ({"model.pretrained": "cut"}, "model.pretrained", "cannot read the checkpoint"),
    ({"model.pretrained": "pickled"}, "model.pretrained", "cannot read the checkpoint"),
    ({"model.pretrained": "shardless"}, "model.pretrained", "cannot read the checkpoint"),
    ({"model.pretrained": "words"}, "model.pretrained", "expected int"),
    ({"train.compute": "cuda:99"}, "train.compute", "choose one of these, or auto"),
    ({"edge.compute": "cuda:99"}, "edge.compute", "choose one of these, or auto"),
    ({"lora.rank": 4}, "lora.rank", "name one, or set lora.rank=0"),
    ({"train.learning-rate": "fast"}, "train.learning-rate", "must be a number"),
    ({"train.learning-rate": -1.0}, "train.learning-rate", "must be > 0"),
    ({"train.optimizer": "adamx"}, "train.optimizer", "did you mean adamw"),
    ({"train.optimizer-arguments": "betaz=1"}, "train.optimizer", "it knows betas"),
    ({"train.learning-rat": 0.1}, "train.learning-rat", "did you mean train.learning-rate"),
]
RUNS: list[Wrong] = [
    ({"clusters": 0}, "clusters", "must be at least 1"),
    ({"num-server-rounds": 10**20}, "num-server-rounds", "must lie between 1 and 1000000"),
    ({"reporting.sinks": "tensorbord"}, "reporting.sinks", "must list some of tensorboard"),
    ({"reporting.metrics": "here"}, "reporting.metrics", "must read like"),
    (
        {"reporting.sinks": "prometheus", "reporting.metrics": "192.0.2.1:9464"},
        "reporting.metrics",
        "choose another",
    ),
    ({"clusters": 3}, "clusters", "set num-supernodes = 3"),
    ({"strategy": "fedsgd"}, "strategy", "did you mean fedavg"),
    ({"strategy-arguments": "x=1"}, "strategy-arguments", "known: fraction_train"),
    ({"strategy": "bulyan"}, "strategy", "use more, or krum"),
    ({"world.devices": "toaster"}, "world.devices", "choose one of raspberry-pi-4"),
    ({"world.devices": ""}, "world.devices", "list presets"),
    ({"world.control-unit": "toaster"}, "world.control-unit", "choose one of raspberry-pi-4"),
    ({"world.memory-share": 1e-6}, "world.memory-share", "add a device, allow smaller"),
    ({"world.memory-share": 2.0}, "world.memory-share", "must lie between"),
    ({"world.memory-share": 0.0}, "world.memory-share", "must lie between"),
    ({"world.channel": "fog"}, "world.channel", "must be one of static"),
    ({"scheduler.policy": "DSSDA"}, "scheduler.policy", "did you mean dssda"),
    ({"scheduler.policy": "astrology"}, "scheduler.policy", "choose one of dssda"),
    ({"seed": 2**63}, "seed", "must lie between 0 and"),
    ({"train.examples-per-round": 10**12}, "train.examples-per-round", "must lie between 0 and"),
    ({"scheduler.micro-batch-sizes": 10**12}, "scheduler.micro-batch-sizes", "from 1 to 1000000"),
    ({"scheduler.micro-batch-sizes": "0"}, "scheduler.micro-batch-sizes", "for example"),
    ({"scheduler.micro-batch-sizes": "65536"}, "world.memory-share", "smaller micro-batch-sizes"),
    ({"links.codec": "zip"}, "links.codec", "must be one of fp32"),
    ({"edge.address": "localhost"}, "edge.address", "must read like"),
    ({"edge.address": "127.0.0.1:99999"}, "edge.address", "a port from 1 to 65535"),
    ({"edge.address": "127.0.0.1:1"}, "edge.address", "start it there by"),
    ({"edge.tls-ca": "no.pem"}, "edge.tls-ca", "write the files by `collapipe certs`"),
    ({"output-dir": "good.csv/runs"}, "output-dir", "choose another"),
    ({"train.state-dir": "good.csv"}, "train.state-dir", "choose another"),
    ({"resume": "folder"}, "resume", "is not the folder of a run"),
    ({"round-late": "join"}, "round-late", "set it, too, to 1.5"),
    ({"runtime": "whole", "round-slack": 2.0}, "round-slack=2", "set runtime=pipeline"),
    ({"runtime": "whole", "round-late": "join"}, "round-late=join", "set runtime=pipeline"),
]
EXTRAS = {  # a missing package, and what needs it
    "datasets": ({}, "collapipe-flwr[data]"),
    "ray": ({}, "collapipe-flwr[simulation]"),
    "sacrebleu": ({"data.task": "translation"}, "collapipe-flwr[metrics]"),
    "peft": ({"lora.rank": 4, "model.pretrained": "checkpoint"}, "collapipe-flwr[lora]"),
    "tensorboard": ({"reporting.sinks": "tensorboard"}, "collapipe-flwr[tensorboard]"),
    "wandb": ({"reporting.sinks": "tensorboard, wandb"}, "collapipe-flwr[wandb]"),
    "mlflow": ({"reporting.sinks": "mlflow"}, "collapipe-flwr[mlflow]"),
    "prometheus_client": ({"reporting.sinks": "prometheus"}, "collapipe-flwr[prometheus]"),
}
FEDERATIONS = {
    "nope.toml": "correct its path",
    "torn.toml": "correct the file",
    "typo.toml": "did you mean num-supernodes",
    "text.toml": "must be a whole number",
    "large.toml": "set it to 2 or less",
}
