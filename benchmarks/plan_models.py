# SPDX-License-Identifier: Apache-2.0
"""Models that plans are compared on: as in torchvision and elsewhere, small enough for a CPU. Each with a batch."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
VOCABULARY, CLASSES = 256, 10


def _classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _images(batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, side, side), torch.randint(CLASSES, (batch,))


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Loss]:
    """Flat, with normalisation, activation and dropout after each layer."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU(), nn.Dropout(0.1)]
    batch = torch.randn(512, 512), torch.randint(CLASSES, (512,))
    return nn.Sequential(*layers, nn.Linear(512, CLASSES)), batch, _classify


class VGG(nn.Module):
    """Features and classifier, and an operation of its own between them."""

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 32, 0, 64, 64, 0, 128, 128, 0):
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(4 * channels, 256), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(256, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Residual(nn.Module):
    """torchvision's BasicBlock: one activation is called twice."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


def _resnet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    channels = 16
    for width in (16, 16, 32, 32, 64, 64):
        layers.append(Residual(channels, width, 2 if width != channels else 1))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class UNet(nn.Module):
    """Skips from the way down to the way up, put together by the model itself."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.down = nn.ModuleList([self._pair(3, width), self._pair(width, 2 * width)])
        self.pool = nn.MaxPool2d(2)
        self.middle = self._pair(2 * width, 4 * width)
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self._pair(4 * width, 2 * width), self._pair(2 * width, width)])
        self.out = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = self.pool(skips[-1])
        x = self.middle(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([widen(x), skips.pop()], 1))
        return self.out(x).mean((2, 3))


class Experts(nn.Module):
    """A mixture of experts without a router that reads data: all of them, weighed by a gate."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def vgg() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Loss]:
    return VGG(), _images(32, 32), _classify


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Loss]:
    return _resnet(), _images(32, 32), _classify


def unet() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Loss]:
    return UNet(), _images(16, 32), _classify


def moe() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Loss]:
    layers = [Experts(256, 4) for _ in range(3)]
    batch = torch.randn(256, 256), torch.randint(CLASSES, (256,))
    return nn.Sequential(*layers, nn.Linear(256, CLASSES)), batch, _classify


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Loss]:
    model = GPT(vocabulary=VOCABULARY, width=128, layers=4, heads=4, context=64)
    tokens, targets = torch.randint(VOCABULARY, (2, 16, 64))
    return model, (tokens, targets), lambda model, x, y: model(x, y)
