"""The ClientApp as Flower's own examples have it: the whole model in the process of the message."""

import time

called_s = time.time()

import torch  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from rounds_app.task import LEARNING_RATE, TimedBatches, get_model, marks  # noqa: E402

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    size = context.run_config["size"]
    model = get_model(size)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
    model.train()
    batches = TimedBatches(size)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    told = MetricRecord({"train_loss": loss.item(), "num-examples": batches.examples})
    arrays = ArrayRecord(model.state_dict())
    told.update(marks(called_s, batches))
    return Message(RecordDict({"arrays": arrays, "metrics": told}), reply_to=msg)
