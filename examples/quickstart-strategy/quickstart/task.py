"""Model, data and training, as in any Flower quickstart; the data is generated, not downloaded."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 3
EXAMPLES = 96


class Net(nn.Module):
    """Tells the arms of a spiral apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES)
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        return self.layers(points)


def load_data(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy points on spiral arms; every partition is another draw."""
    generator = torch.Generator().manual_seed(1000 + partition)
    radius = torch.rand(EXAMPLES, generator=generator)
    labels = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    angle = 4 * radius + labels * (2 * math.pi / CLASSES)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.02 * torch.randn(EXAMPLES, 2, generator=generator), labels


def train(net: Net, partition: int, epochs: int, learning_rate: float) -> float:
    """Train in place; returns the last loss."""
    points, labels = load_data(partition)
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    for _ in range(epochs):
        for batch in range(0, EXAMPLES, 16):
            optimizer.zero_grad()
            scores = net(points[batch : batch + 16])
            loss = F.cross_entropy(scores, labels[batch : batch + 16])
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: Net, partition: int) -> tuple[float, float]:
    """Loss and accuracy on a partition."""
    points, labels = load_data(partition)
    scores = net(points)
    accuracy = (scores.argmax(dim=1) == labels).float().mean()
    return float(F.cross_entropy(scores, labels)), float(accuracy)
