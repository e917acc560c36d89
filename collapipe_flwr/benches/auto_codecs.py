"""What ``links.codec=auto`` gives the hops of a chain: the codecs of DSSDA's plan for it.

It chooses from what a run's plans choose from by default.

The cluster is two Raspberry Pi 4 behind a Pi 5 over the simulated Wi-Fi, each with room for little
more than half of the blocks, so that both work.
"""

from __future__ import annotations

from dataclasses import replace

from collapipe_flwr.core.config import LinksConfig, name_list
from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import make_world

DEVICES = ("raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-4")
ROOM = 0.7  # of what all blocks need


def auto_codecs(model: ModelProfile, *, micro_batch: int, micro_batches: int) -> tuple[str, ...]:
    """Codecs from control unit to edge, over two devices."""
    world = make_world(cluster_devices=[DEVICES], examples=[micro_batch * micro_batches])
    batch = micro_batch * micro_batches
    need = sum(block.state_bytes + batch * block.stash_bytes for block in model.blocks)
    (profile,) = world.clusters
    devices = (replace(d, memory_bytes=int(ROOM * need)) for d in profile.devices)
    world = replace(world, clusters=(replace(profile, devices=tuple(devices)),))
    settings = SchedulerConfig(
        micro_batch_sizes=(micro_batch,),
        micro_batches=(micro_batches,),
        codecs=name_list(LinksConfig().codecs),
    )
    scheduler, snapshot = make_scheduler("dssda", settings), world.snapshot(1, model)
    plan, _ = scheduler.step(scheduler.init(snapshot), snapshot)
    return tuple(hop.codec for hop in plan.clusters[0].hops)
