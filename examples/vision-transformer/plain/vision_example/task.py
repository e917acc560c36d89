"""Model, data, training and test of a vision transformer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 16
IMAGE_SIZE = 16
CLASSES = 4
TRAIN_IMAGES = 128
TEST_IMAGES = 64


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T, width) to tokens of the same shape."""
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Classifies images by the class token behind blocks over patches."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        tokens = (IMAGE_SIZE // patch) ** 2 + 1
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, CLASSES) of images (B, 1, IMAGE_SIZE, IMAGE_SIZE)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        x = torch.cat([class_token, patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def get_images(count: int, seed: int) -> TensorDataset:
    """Noisy stripes: the class is their direction, width and place vary."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    phases, frequencies = 2 * torch.pi * torch.rand(2, count, 1, 1, generator=generator)
    angles = (labels * torch.pi / CLASSES).view(-1, 1, 1)
    rows, columns = torch.meshgrid(*2 * [torch.linspace(-1, 1, IMAGE_SIZE)], indexing="ij")
    along = columns * angles.cos() + rows * angles.sin()
    stripes = torch.sin((3 + frequencies) * along + phases)
    noise = 0.5 * torch.randn(stripes.shape, generator=generator)
    return TensorDataset((stripes + noise).unsqueeze(1), labels)


def load_data(partition_id: int) -> tuple[DataLoader, DataLoader]:
    """The loaders of one partition for training and test."""
    trainset = get_images(TRAIN_IMAGES, seed=2 * partition_id)
    testset = get_images(TEST_IMAGES, seed=2 * partition_id + 1)
    return DataLoader(trainset, batch_size=BATCH_SIZE), DataLoader(testset, batch_size=BATCH_SIZE)


def train(model: nn.Module, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Train in place; returns the mean loss over all steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    losses = []
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model: nn.Module, testloader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy over the images."""
    model.eval()
    batches = [(model(images), labels) for images, labels in testloader]
    logits, labels = map(torch.cat, zip(*batches, strict=True))
    return F.cross_entropy(logits, labels).item(), accuracy(logits, labels)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of images whose highest score is that of their label."""
    return (logits.argmax(dim=-1) == labels).float().mean().item()
