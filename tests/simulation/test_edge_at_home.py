"""A control unit that is its cluster's edge, as plans see it."""

from __future__ import annotations

from dataclasses import replace

from collapipe_flwr.core.domain import BlockCost, LinkRate, ModelProfile
from collapipe_flwr.scheduler.edges import divide_memory
from collapipe_flwr.simulation.world import make_world, with_edge_at_home

PART = BlockCost(
    forward_flop=1e6,
    backward_flop=2e6,
    parameter_bytes=100,
    state_bytes=400,
    stash_bytes=10.0,
    output_bytes=10.0,
)
MODEL = ModelProfile(embedding=PART, blocks=(PART, PART), decoder=replace(PART, state_bytes=600))


def cluster():
    world = make_world(cluster_devices=[["raspberry-pi-5", "raspberry-pi-4"]], examples=[8])
    (found,) = world.clusters
    unit, device = (member.device_id for member in found.members)
    rates = (
        LinkRate(ends=("", device), bit_per_s=1e6),
        LinkRate(ends=(unit, device), bit_per_s=5e6),
    )
    return world, replace(found, link_rates=rates)


def test_its_links_are_those_of_the_control_unit() -> None:
    _, before = cluster()
    home = with_edge_at_home(before)
    assert home.edge is not None
    assert home.edge.speed_flop_per_s == before.control_unit.speed_flop_per_s
    rates = {link.ends: link.bit_per_s for link in home.link_rates}
    assert rates[("", before.devices[0].device_id)] == 5e6


def test_both_parts_together_have_its_memory_once() -> None:
    _, before = cluster()
    home = divide_memory(with_edge_at_home(before), MODEL)
    assert home.edge is not None
    together = home.control_unit.memory_bytes + home.edge.memory_bytes
    assert together == before.control_unit.memory_bytes
    assert home.control_unit.memory_bytes >= MODEL.embedding.state_bytes
    assert home.edge.memory_bytes >= MODEL.decoder.state_bytes
    assert divide_memory(with_edge_at_home(home), MODEL) == home  # also a second time


def test_the_edge_hears_devices_as_the_control_unit_does() -> None:
    world, before = cluster()
    snapshot = world.with_cluster(with_edge_at_home(before)).snapshot(1, MODEL)
    channel = snapshot.clusters[0].channel
    assert channel.edge_gain[1:] == channel.d2d_gain[0][1:]
