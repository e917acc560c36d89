"""CollaPipe for Flower: a cluster of weak devices trains a transformer as one Flower client."""

from collapipe_flwr.renamed import install

install()
