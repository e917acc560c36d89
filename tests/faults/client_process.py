"""A ClientApp process as a SuperNode starts one per message: pickles in by stdin, out by stdout.

It notes when a round begins and when a step ends in the file `FAULT_STEPS`. At the phase
`FAULT_PHASE` of round `FAULT_ROUND` it makes the file `FAULT_STRUCK`, once in a run, and kills
itself if `FAULT_ROLE` is ``control unit``; else whoever waits for that file strikes.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Error, Message
from flwr.supercore.task_identity import TaskIdentity

from client_app.app import app
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.federation.local_grid import CLIENT_APP_RAISED
from collapipe_flwr.federation.records import flower_round
from collapipe_flwr.pipeline.roles import FirstStage


def _note(line: str) -> None:
    with open(os.environ["FAULT_STEPS"], "a") as file:
        file.write(f"{line} {time.time()}\n")


def _strike() -> None:
    try:
        os.close(os.open(os.environ["FAULT_STRUCK"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    _note("struck")
    if os.environ["FAULT_ROLE"] == "control unit":
        os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: type, name: str, when: Callable[..., bool]) -> None:
    method = getattr(owner, name)

    def struck(*args: Any, **more: Any) -> Any:
        if when(*args):
            _strike()
        return method(*args, **more)

    setattr(owner, name, struck)


def _arm(phase: str) -> None:
    always = {
        "placing": (RemoteFleet, "open_chain"),
        "collecting": (RemoteFleet, "collect"),
    }
    if phase in always:
        _before(*always[phase], lambda *_: True)
    if phase == "forward":
        _before(FirstStage, "_emit", lambda _, frame, __: (frame.step, frame.micro_batch) == (1, 1))


def _note_steps() -> None:
    train_step = FirstStage.train_step

    def noted(stage: FirstStage, batch: Any) -> Any:
        result = train_step(stage, batch)
        _note("step")
        return result

    FirstStage.train_step = noted  # type: ignore[method-assign]


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message, node, config, state, run_config = pickle.load(sys.stdin.buffer)
    context = Context(1, node, config, state, run_config)
    armed = False
    if message.metadata.message_type == "train":
        server_round = flower_round(message.content)
        _note(f"round-{server_round}")
        armed = server_round == int(os.environ["FAULT_ROUND"])
    if armed:
        _arm(os.environ["FAULT_PHASE"])
    _note_steps()
    try:
        reply: Message = app(message, context)
    except Exception as error:  # as Flower does with whatever a client raises
        reason = f"{type(error)}:<'{error}'>"
        reply = Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
    if armed and os.environ["FAULT_PHASE"] == "replying":
        _strike()
    pickle.dump((reply, context.state), out)
    out.flush()


if __name__ == "__main__":
    main()
