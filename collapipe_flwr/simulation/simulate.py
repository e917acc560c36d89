"""All policies of a setting in the worlds of all its seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.work import merge_ends
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.score import Bounds, Score, compute_bounds, make_target, score
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.world import World

OURS = "dssda"
WHOLE = "fedavg"  # trains the whole model on one device: embedding and decoder, too

Tick = Callable[[str], None]
"""Called after every step of long work with the name of what is being done."""


def ignore_tick(doing: str) -> None:
    """Ignore a tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy over all seeds, or the reason why it could not run."""

    policy: str
    scores: tuple[Score, ...]
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Every policy of a setting."""

    setting: Setting
    policies: tuple[PolicyResult, ...]
    bounds: tuple[Bounds, ...]  # one per seed of the setting: what no pipeline can beat

    def policy(self, name: str) -> PolicyResult | None:
        """Return the policy of that name if it ran."""
        found = (p for p in self.policies if p.policy == name and p.refusal is None)
        return next(found, None)


def simulate(setting: Setting, tick: Tick = ignore_tick) -> Simulation:
    """Run everything; a policy whose rule fits no device is reported, not raised.

    Raises ConfigError for unusable settings, ScheduleError when no policy could run.
    """
    profile = setting.model.profile()
    worlds = [(seed, setting.world(seed, profile)) for seed in setting.seeds]
    results = tuple(_policy(setting, name, profile, worlds, tick) for name in setting.policies)
    if all(result.refusal for result in results):
        raise ScheduleError(f"no policy could run; {results[0].policy}: {results[0].refusal}")
    settings, rounds = setting.settings, setting.rounds
    bounds = [compute_bounds(world.true, profile, settings, rounds) for _, world in worlds]
    return Simulation(setting=setting, policies=results, bounds=tuple(bounds))


def _policy(
    setting: Setting,
    name: str,
    profile: ModelProfile,
    worlds: list[tuple[int, World]],
    tick: Tick,
) -> PolicyResult:
    scores = []
    trained = merge_ends(profile) if name == WHOLE else profile
    scheduler, settings = make_scheduler(name, setting.settings), setting.settings
    for seed, world in worlds:
        seen, rounds = setting.distortion.view(world, trained), []
        episode = run_episode(
            world, scheduler, trained, setting.rounds, options=settings, seen=seen
        )
        try:
            for done in episode:
                tick(name)
                rounds.append(done)
        except ScheduleError as error:
            return PolicyResult(policy=name, scores=(), refusal=f"seed {seed}: {error}")
        target = make_target(world, profile, settings)
        scores.append(score(world.true, trained, seed, rounds, target))
    return PolicyResult(policy=name, scores=tuple(scores))
