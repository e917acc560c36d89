"""Grids take the ids of messages under the name of every Flower version."""

import pytest

from collapipe_flwr.federation.wrapped_grid import choose_ids


def test_ids_are_taken_under_either_name_but_not_under_both():
    assert choose_ids(["a"], None) == choose_ids(None, ["a"]) == ["a"]
    assert choose_ids(None, None) is None
    assert choose_ids([], None) == []
    with pytest.raises(TypeError, match="not both"):
        choose_ids(["a"], ["b"])
