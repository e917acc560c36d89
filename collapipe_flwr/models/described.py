"""A model as server and clusters know it: how it is cut, and what its batches are."""

from __future__ import annotations

from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.spec import BatchShape


class DescribedModel:
    """A model that ``splitter`` cuts, for batches of ``shape``.

    Plans choose the size of batches where ``batch_size`` is None. ``personal`` parameters (modules
    or tensors) are never averaged.
    """

    def __init__(
        self,
        splitter: AnySplitter,
        shape: BatchShape,
        *,
        batch_size: int | None = None,
        personal: tuple[str, ...] = (),
    ) -> None:
        self.splitter = splitter
        self.shape = shape
        self.batch_size = batch_size
        self.personal = personal

    @property
    def aliases(self) -> dict[str, str]:
        """Keys of the model's ``state_dict`` that travel under another one."""
        return self.splitter.aliases

    @property
    def personal_keys(self) -> frozenset[str]:
        """All keys of the ``state_dict`` that ``personal`` names, aliases included."""
        keys = self.splitter.state_keys if self.personal else ()
        found = {k for k in keys for n in self.personal if k == n or k.startswith(f"{n}.")}
        return frozenset(found)
