"""A small network, its training and its data, as in Flower's PyTorch quickstart; it does not import fedleak."""

import os
from functools import cache
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from skimage import data
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
SIZE = 32


class Net(nn.Module):
    """Two convolutions and three linear layers, for images (3, 32, 32) of ten classes."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
        return self.fc3(F.relu(self.fc2(x)))


class NormedNet(Net):
    """The same network with batch norm after each convolution."""

    def __init__(self):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(6)
        self.bn2 = nn.BatchNorm2d(16)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.pool(F.relu(self.bn2(self.conv2(x))))
        x = F.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
        return self.fc3(F.relu(self.fc2(x)))


@cache
def load_images():
    """Return all examples: 32x32 windows of photographs at half their size, labelled by the number of the photograph.

    If QUICKSTART_DATA names an .npz file with `images` (N, 32, 32, 3) uint8 and `labels` (N,), its examples are returned
    instead, such as those of CIFAR-10 on a machine that cannot download it.
    """
    if path := os.environ.get("QUICKSTART_DATA"):
        with np.load(path) as archive:
            images = torch.from_numpy(archive["images"]).permute(0, 3, 1, 2).float().div(255)
            return images, torch.from_numpy(archive["labels"]).long()
    photographs = [data.astronaut(), data.cat(), data.coffee(), data.rocket(), *load_sample_images().images]
    images, labels = [], []
    for label, photograph in enumerate(photographs):
        x = torch.tensor(photograph[..., :3]).permute(2, 0, 1).float().div(255)
        x = F.avg_pool2d(x, 2)
        windows = x.unfold(1, SIZE, SIZE).unfold(2, SIZE, SIZE).permute(1, 2, 0, 3, 4).reshape(-1, 3, SIZE, SIZE)
        windows = windows[windows.std(dim=(2, 3)).mean(dim=1) > 0.1]  # leave out windows of one colour
        images.append(windows)
        labels.append(torch.full((len(windows),), label))
    order = torch.randperm(sum(map(len, labels)), generator=torch.Generator().manual_seed(1))
    return torch.cat(images)[order], torch.cat(labels)[order]


def load_data(partition_id, num_partitions, batch_size, limit=None):
    """Return loaders of training and test examples of one partition: every `num_partitions`-th example, 4/5 for training."""
    x, y = load_images()
    x, y = x[partition_id::num_partitions] * 2 - 1, y[partition_id::num_partitions]
    split = len(x) * 4 // 5
    trainset = TensorDataset(x[:split][:limit], y[:split][:limit])
    return DataLoader(trainset, batch_size=batch_size), DataLoader(TensorDataset(x[split:], y[split:]), batch_size=32)


def train(net, loader, epochs, lr, *, momentum=0.0, mode=True, steps=None):
    """Train the network in place, for at most `steps` steps of each epoch; return the mean loss."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    net.train(mode)
    total = 0.0
    for _ in range(epochs):
        for images, labels in islice(loader, steps):
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader):
    """Return the mean loss of batches and the accuracy."""
    net.eval()
    correct, total = 0, 0.0
    with torch.no_grad():
        for images, labels in loader:
            logits = net(images)
            total += F.cross_entropy(logits, labels).item()
            correct += (logits.argmax(dim=1) == labels).sum().item()
    return total / len(loader), correct / len(loader.dataset)
