"""What talks to Flower: the only package that needs the extra `flower`."""

from collapipe_flwr.core.errors import require

require("flwr", "flower")
