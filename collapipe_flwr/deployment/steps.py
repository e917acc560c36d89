"""Steps as bash: each tests whether it is done already, so that doing all of them again is safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from shlex import quote

from collapipe_flwr.core.errors import LinkError

_LOCK_S = 60


class Outcome(StrEnum):
    """Of a step."""

    KEPT = "kept"  # was done before
    DID = "did"
    WOULD = "would"  # in a dry run
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``action`` is run if ``test`` fails; it ends at its first command that fails.

    What the action says last, on failure, is told.
    """

    name: str
    test: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a step on a machine."""

    machine: str
    step: str
    outcome: Outcome
    why: str = ""


_PRELUDE = """
exec 9< /opt
flock -w {lock_s} 9 || {{
  printf 'failed\\tlock\\tanother deployment is at work there: wait until it has ended\\n'
  exit 0
}}
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
step() {{
  if ( "test_$1" ) > /dev/null 2>&1 < /dev/null 9>&-; then
    printf 'kept\\t%s\\t\\n' "$2"
  elif [ -n '{dry}' ]; then
    printf 'would\\t%s\\t\\n' "$2"
  else
    said=$( set -e; "do_$1" 2>&1 < /dev/null 9>&- )
    if [ $? -ne 0 ]; then
      said=$(printf '%s' "$said" | grep -v '^ *$' | tail -n 3 | cut -c 1-300 | tr '\\t\\n' '  ')
      printf 'failed\\t%s\\t%s\\n' "$2" "$said"
      exit 0
    fi
    printf 'did\\t%s\\t\\n' "$2"
  fi
}}
"""


def script_of(steps: Sequence[Step], *, dry: bool) -> str:
    """The bash script of these steps; see `results_in` for what it says."""
    parts = [_PRELUDE.format(lock_s=_LOCK_S, dry="dry" if dry else "")]
    for number, each in enumerate(steps):
        parts.append(f"test_{number}() {{\n{each.test}\n}}")
        parts.append(f"do_{number}() {{\n{each.action}\n}}")
    parts += [f"step {number} {quote(each.name)}" for number, each in enumerate(steps)]
    return "\n".join(parts)


def results_in(text: str, machine: str, steps: Sequence[Step]) -> list[Result]:
    """What a script said, in order; raises LinkError where it broke off without a failure."""
    lines = [line.split("\t", 2) for line in text.splitlines() if line.count("\t") >= 2]
    found = [
        Result(machine=machine, step=name, outcome=Outcome(word), why=why.strip())
        for word, name, why in lines
    ]
    failed = any(result.outcome is Outcome.FAILED for result in found)
    if not failed and len(found) < len(steps):
        missing = steps[len(found)].name
        raise LinkError(f"it broke off at {missing!r}: deploy again, which goes on from there")
    return found
