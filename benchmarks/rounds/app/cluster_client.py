"""The ClientApp of a cluster."""

import time

called_s = time.time()

from flwr.app import Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from rounds_app.task import TimedBatches, marks  # noqa: E402

from collapipe_flwr import Cluster  # noqa: E402

app = ClientApp()
cluster = Cluster(app)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train on the devices of the cluster file."""
    global called_s
    batches, begun_s = TimedBatches(context.run_config["size"]), called_s or time.time()
    called_s = 0.0  # of later messages of this process
    reply = cluster.train(msg, context, batches)
    reply.content["metrics"].update(marks(begun_s, batches))
    return reply
