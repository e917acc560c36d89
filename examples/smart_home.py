"""Makes conversations with a smart home: a wish in plain words, the command for it as JSON.

    python examples/smart_home.py OUT.jsonl [ROWS]

Each row has ``messages``, as the task ``instruct`` reads them. No two wishes are the same, so the
rows that a run keeps for testing are new to the model.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOMS = "kitchen, bedroom, bathroom, living room, hall, study, attic, cellar, nursery, garage"
_SWITCHED = "lamp, fan, radio, television, humidifier, kettle"
_DIMMED = "lamp, blind, speaker"
_WARMED = "heating, floor heating, air conditioning"
_SWITCHING = (
    "Turn {value} the {device} in the {room}.",
    "Please switch the {room} {device} {value}.",
    "I want the {device} of the {room} to be {value}.",
    "The {room} {device} should be {value} now.",
)
_DIMMING = (
    "Set the {device} in the {room} to {value} percent.",
    "Could you put the {room} {device} at {value} %?",
    "Let the {device} of the {room} be at {value} percent, please.",
)
_WARMING = (
    "Set the {device} in the {room} to {value} degrees.",
    "I would like {value} degrees from the {device} in the {room}.",
    "Make the {room} {device} aim for {value} degrees.",
)
_KINDS = (
    (_SWITCHING, _SWITCHED, ("on", "off")),
    (_DIMMING, _DIMMED, tuple(range(10, 100, 10))),
    (_WARMING, _WARMED, tuple(range(17, 25))),
)


def wishes() -> Iterator[tuple[str, str]]:
    """All wishes, each with its command."""
    for patterns, devices, values in _KINDS:
        places = itertools.product(patterns, _ROOMS.split(", "), devices.split(", "), values)
        for pattern, room, device, value in places:
            command = {"room": room, "device": device, "set": value}
            yield pattern.format(room=room, device=device, value=value), json.dumps(command)


def main(out: str, rows: str = "1200") -> None:
    """Write so many of them, in random order."""
    chosen = random.Random(0).sample(sorted(wishes()), int(rows))
    with Path(out).open("w", encoding="utf-8") as file:
        for wish, command in chosen:
            messages = [
                {"role": "user", "content": wish},
                {"role": "assistant", "content": command},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
