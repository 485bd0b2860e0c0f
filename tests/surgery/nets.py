"""Small foreign architectures, written the way people write them: what `surgery` must handle without knowing them."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

# -- plain chains ------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, widths=(7, 12, 12, 9, 4)):
        super().__init__()
        layers = []
        for before, after in itertools.pairwise(widths[:-1]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))

    def forward(self, x):
        return self.net(x)


class VggFlat(nn.Module):
    """Flattens a map of several pixels, so that one channel feeds several inputs of the linear layer."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, 2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(8 * 2 * 3, 10), nn.ReLU(True), nn.Dropout(), nn.Linear(10, 5), nn.ReLU(True), nn.Linear(5, 4)
        )

    def forward(self, x):
        x = self.features(x)
        x = x.view(x.size(0), -1)
        return self.classifier(x)


class Chain(nn.Module):
    """conv - activation - conv: what becomes of a zero depends on the activation alone."""

    def __init__(self, activation, norm=None, bias=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
        self.norm1 = norm(8) if norm else nn.Identity()
        self.act1 = activation()
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=bias)
        self.norm2 = norm(6) if norm else nn.Identity()
        self.act2 = activation()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.act1(self.norm1(self.conv1(x)))
        x = self.act2(self.norm2(self.conv2(x)))
        return self.fc(x.mean(dim=(2, 3)))


class ChannelPReLU(nn.Module):
    """PReLU with a slope for each channel, a parameter that has to be narrowed too."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.prelu1 = nn.PReLU(8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.prelu2 = nn.PReLU(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.prelu1(self.bn1(self.conv1(x)))
        x = self.prelu2(self.conv2(x))
        return self.fc(x.mean((2, 3)))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.conv2(x)
        y += x
        F.relu_(y)
        x = self.conv3(y)
        x.mul_(0.5)
        x = F.relu(x, inplace=True)
        return self.fc(F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1))


class OutOfOrder(nn.Module):
    """Declares its layers in another order than it uses them, so that a norm looks as if it followed another one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.bn2 = nn.BatchNorm2d(8)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Tied(nn.Module):
    """One convolution and one activation, applied several times."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.last = nn.Conv2d(8, 6, 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.relu(self.stem(x))
        x = self.relu(self.shared(x))
        x = self.relu(self.shared(x))
        x = self.relu(self.last(x))
        return self.fc(x.flatten(2).mean(-1))


class TiedWeights(nn.Module):
    """Two linear layers that hold one tensor, as input and output embeddings of language models do."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, 10)
        self.mid = nn.Linear(10, 10)
        self.mid.weight = self.inp.weight
        self.head = nn.Linear(10, 4)

    def forward(self, x):
        return self.head(torch.relu(self.mid(torch.relu(self.inp(x)))))


class Conv1dNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 6, 5, padding=2)
        self.bn1 = nn.BatchNorm1d(6)
        self.conv2 = nn.Conv1d(6, 8, 3, dilation=2, bias=False)
        self.bn2 = nn.BatchNorm1d(8)
        self.fc1 = nn.Linear(8 * 3, 10)
        self.bn3 = nn.BatchNorm1d(10)
        self.fc2 = nn.Linear(10, 3)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.adaptive_avg_pool1d(F.leaky_relu(self.bn2(self.conv2(x)), 0.1), 3)
        x = torch.flatten(x, start_dim=1)
        return self.fc2(F.relu(self.bn3(self.fc1(x))))


class Conv3dNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm3d(4),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(4, 6, 3, padding=1),
            nn.ReLU6(),
            nn.AvgPool3d(2),
            nn.Flatten(),
            nn.Linear(6 * 2, 4),
        )

    def forward(self, x):
        return self.net(x)


class Autoencoder(nn.Module):
    """Down, a dense bottleneck, and up again with transposed convolutions, one of them grouped."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU()
        )
        self.squeeze = nn.Linear(8 * 2 * 2, 10)
        self.expand = nn.Linear(10, 8 * 2 * 2)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(6, 1, 3, padding=1),
        )

    def forward(self, x):
        z = self.squeeze(self.encoder(x).flatten(1))
        y = F.relu(self.expand(z)).reshape(-1, 8, 2, 2)
        return torch.sigmoid(self.decoder(y))


# -- residual streams --------------------------------------------------------------------------------------------


class LambdaLayer(nn.Module):
    def __init__(self, lambd):
        super().__init__()
        self.lambd = lambd

    def forward(self, x):
        return self.lambd(x)


class LambdaBlock(nn.Module):
    """The CIFAR block that most repositories copy: option A puts the old channels in the middle of the new ones."""

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = LambdaLayer(
                lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class InlinePadBlock(nn.Module):
    """Option A in the forward pass itself, with an average pool and a concatenation with zeros."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.stride = stride
        self.extra = planes - inplanes

    def forward(self, x):
        residual = x
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride == 2:
            residual = F.avg_pool2d(x, 2)
            residual = F.pad(residual, (0, 0, 0, 0, 0, self.extra))
        elif self.extra:
            zeros = torch.zeros(x.shape[0], self.extra, x.shape[2], x.shape[3], dtype=x.dtype, device=x.device)
            residual = torch.cat((x, zeros), dim=1)
        return F.relu(out + residual)


class SmallResNet(nn.Module):
    def __init__(self, block, widths=(8, 16, 32)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = nn.Sequential(block(widths[0], widths[0]), block(widths[0], widths[0]))
        self.layer2 = nn.Sequential(block(widths[0], widths[1], 2), block(widths[1], widths[1]))
        self.layer3 = nn.Sequential(block(widths[1], widths[2], 2), block(widths[2], widths[2]))
        self.linear = nn.Linear(widths[2], 4)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[2:])
        out = out.view(out.size(0), -1)
        return self.linear(out)


class InlineResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            [InlinePadBlock(8, 8), InlinePadBlock(8, 12), InlinePadBlock(12, 16, 2), InlinePadBlock(16, 16)]
        )
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        for block in self.blocks:
            x = block(x)
        return self.linear(x.mean((-2, -1)))


class PreActBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False))

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class PreActResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layers = nn.Sequential(PreActBlock(8, 8), PreActBlock(8, 16, 2), PreActBlock(16, 16))
        self.bn = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.layers(self.conv1(x))))
        return self.linear(F.adaptive_avg_pool2d(x, (1, 1)).view(x.size(0), -1))


class ResNeXtBlock(nn.Module):
    def __init__(self, before, inner, after, groups):
        super().__init__()
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = None
        if before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + identity)


class ResNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(ResNeXtBlock(8, 12, 16, 3), ResNeXtBlock(16, 12, 16, 4))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio):
        super().__init__()
        hidden = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        layers = []
        if expand_ratio != 1:
            layers += [nn.Conv2d(inp, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
            InvertedResidual(8, 6, 1, 1),
            InvertedResidual(6, 8, 2, 3),
            InvertedResidual(8, 8, 1, 3),
            InvertedResidual(8, 8, 1, 2),
            nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x):
        x = self.features(x)
        x = x.mean([2, 3])
        return self.classifier(x)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced, gate=nn.Hardsigmoid):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, reduced, 1)
        self.fc2 = nn.Conv2d(reduced, channels, 1)
        self.gate = gate()

    def forward(self, x):
        scale = self.gate(self.fc2(F.relu(self.fc1(self.avgpool(x)))))
        return scale * x


class SqueezeExciteLinear(nn.Module):
    """The same with linear layers, and the reshapes between them."""

    def __init__(self, channels, reduced):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, reduced, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(reduced, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = F.adaptive_avg_pool2d(x, 1).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class MobileNetV3(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        )
        self.se = SqueezeExcite(16, 6)
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.Sequential(nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.SiLU())
        self.se2 = SqueezeExciteLinear(12, 5)
        self.classifier = nn.Linear(12, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.project(self.se(self.depthwise(self.expand(x))))
        x = self.se2(self.last(x))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


# -- concatenation, splitting, shuffling -------------------------------------------------------------------------


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth, bn_size):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, bn_size * growth, kernel_size=1, stride=1, bias=False)
        self.norm2 = nn.BatchNorm2d(bn_size * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bn_size * growth, growth, kernel_size=3, stride=1, padding=1, bias=False)

    def forward(self, features):
        x = torch.cat(features, 1)
        return self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers, inputs, growth, bn_size):
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(inputs + i * growth, growth, bn_size))

    def forward(self, init_features):
        features = [init_features]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            DenseBlock(2, 8, 4, 2),
            nn.Sequential(
                nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 1, bias=False), nn.AvgPool2d(2, 2)
            ),
            DenseBlock(2, 8, 4, 2),
            nn.BatchNorm2d(16),
        )
        self.classifier = nn.Linear(16, 4)

    def forward(self, x):
        out = F.relu(self.features(x), inplace=True)
        out = torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1)
        return self.classifier(out)


class BasicConv(nn.Module):
    def __init__(self, before, after, **kwargs):
        super().__init__()
        self.conv = nn.Conv2d(before, after, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(after, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionBlock(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.branch1 = BasicConv(inputs, 4, kernel_size=1)
        self.branch2 = nn.Sequential(
            BasicConv(inputs, 6, kernel_size=1), BasicConv(6, 8, kernel_size=(1, 3), padding=(0, 1))
        )
        self.branch3 = nn.Sequential(BasicConv(inputs, 4, kernel_size=1), BasicConv(4, 6, kernel_size=5, padding=2))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), BasicConv(inputs, 5, kernel_size=1))

    def forward(self, x):
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], dim=1)


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = BasicConv(3, 8, kernel_size=3, padding=1)
        self.mixed1 = InceptionBlock(8)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.mixed2 = InceptionBlock(23)
        self.fc = nn.Linear(23, 4)

    def forward(self, x):
        x = self.mixed2(self.pool(self.mixed1(self.stem(x))))
        return self.fc(torch.mean(x, dim=[-1, -2]))


def channel_shuffle(x, groups):
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(batch, channels, height, width)


class ShuffleUnit(nn.Module):
    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch(x2)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True))
        self.stage = nn.Sequential(ShuffleUnit(12), ShuffleUnit(12))
        self.conv5 = nn.Sequential(nn.Conv2d(12, 10, 1, bias=False), nn.BatchNorm2d(10), nn.ReLU(inplace=True))
        self.fc = nn.Linear(10, 4)

    def forward(self, x):
        return self.fc(self.conv5(self.stage(self.stem(x))).mean([2, 3]))


class ShuffleNetV1(nn.Module):
    """Grouped pointwise convolutions with a shuffle between them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.gconv1 = nn.Conv2d(12, 12, 1, groups=3, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.shuffle = nn.ChannelShuffle(3)
        self.dwconv = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.bn2 = nn.BatchNorm2d(12)
        self.gconv3 = nn.Conv2d(12, 12, 1, groups=3, bias=False)
        self.bn3 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        out = self.shuffle(F.relu(self.bn1(self.gconv1(x))))
        out = self.bn3(self.gconv3(self.bn2(self.dwconv(out))))
        return self.fc(F.relu(x + out).mean([2, 3]))


class UnequalSplit(nn.Module):
    """Splits of unequal size, slices of channels, a stack that is summed, and x against -x (CReLU)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 9, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(9)
        self.a = nn.Conv2d(2, 5, 3, padding=1, bias=False)
        self.b = nn.Conv2d(4, 5, 1, bias=False)
        self.c = nn.Conv2d(6, 5, 1)
        self.out = nn.Conv2d(10, 6, 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        a, b, _ = torch.split(x, [2, 4, 3], dim=1)
        y = torch.stack([self.a(a), self.b(b), self.c(x[:, 3:])]).sum(0)
        y = F.relu(torch.cat([y, -y], dim=1))
        return self.fc(F.relu(self.out(y)).amax(dim=(2, 3)))


class DoubleConv(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, before, after, transposed):
        super().__init__()
        self.up = nn.ConvTranspose2d(before, before // 2, 2, stride=2) if transposed else None
        self.conv = DoubleConv(before // 2 + after if transposed else before + after, after)

    def forward(self, x1, x2):
        x1 = self.up(x1) if self.up is not None else F.interpolate(x1, scale_factor=2, mode="nearest")
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.inc = DoubleConv(1, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.up1 = Up(16, 8, transposed)
        self.up2 = Up(8, 4, transposed)
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


class SuperResolution(nn.Module):
    """Pixel shuffle turns channels into pixels: four neighbouring ones are one channel of the result."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(2, 4, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(2)

    def forward(self, x):
        x = self.pixel_shuffle(F.relu(self.conv2(F.relu(self.conv1(x)))))
        return self.pixel_shuffle(self.conv3(x))


# -- where a zero channel is not an absent channel ---------------------------------------------------------------


class GroupNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.gn1 = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.gn2 = nn.GroupNorm(1, 6)
        self.conv3 = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.gn3 = nn.GroupNorm(8, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.gn1(self.conv1(x)))
        x = F.relu(self.gn2(self.conv2(x)))
        x = F.relu(self.gn3(self.conv3(x)))
        return self.fc(x.amax((2, 3)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + x


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.blocks = nn.Sequential(ConvNeXtBlock(8), ConvNeXtBlock(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


class LocalResponseNorm(nn.Module):
    """Each channel is divided by its neighbours: who is neighbour to whom must not change."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.lrn = nn.LocalResponseNorm(3, alpha=1.0)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.lrn(F.relu(self.conv1(x)))
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class SpatialAttention(nn.Module):
    """CBAM: a mean and a maximum over the channels, which count the channels that are zero."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.attend = nn.Conv2d(2, 1, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.conv1(x)
        mean = torch.mean(x, dim=1, keepdim=True)
        highest, _ = torch.max(x, dim=1, keepdim=True)
        x = F.relu(x * torch.sigmoid(self.attend(torch.cat([mean, highest], dim=1))))
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class ChannelSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.gate = nn.Linear(8, 8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        weights = F.softmax(self.gate(x.mean((2, 3))), dim=1)
        x = x * weights[:, :, None, None]
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class ConstantShift(nn.Module):
    """A learnt shift, a constant and a positional map are added to channels, so that a zero does not stay zero."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.shift = nn.Parameter(torch.ones(1, 8, 1, 1))
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.register_buffer("where", torch.linspace(0.1, 1, 6 * 8).view(1, 1, 6, 8))
        self.conv3 = nn.Conv2d(8, 6, 3, padding=1)
        self.conv4 = nn.Conv2d(6, 6, 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x) + self.shift)
        x = F.relu(self.conv2(x)) + self.where
        x = torch.abs(1 - self.conv3(x))
        x = torch.exp(self.conv4(x).clamp(max=1))
        return self.fc(x.mean((2, 3)))


# -- attention and recurrence ------------------------------------------------------------------------------------


class ConvGRU(nn.Module):
    """Channels flow into a GRU, which surgery does not take apart."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 6, 3, padding=1)
        self.conv2 = nn.Conv1d(6, 8, 3, padding=1)
        self.gru = nn.GRU(8, 7, batch_first=True)
        self.fc1 = nn.Linear(7, 9)
        self.fc2 = nn.Linear(9, 3)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        out, _ = self.gru(x.permute(0, 2, 1))
        return self.fc2(F.relu(self.fc1(out[:, -1])))


class HandAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class MultiheadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


class PlainAttention(nn.Module):
    """Separate q, k and v, and the softmax written out."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(dim, dim)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        attention = torch.softmax(q @ k.transpose(-2, -1) / self.size**0.5, dim=-1)
        return self.out((attention @ v).transpose(1, 2).contiguous().view(x.shape))


class ViTBlock(nn.Module):
    def __init__(self, dim, heads, hidden, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, attention, dim=12, heads=3, hidden=20, patches=6):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, dim))
        self.blocks = nn.Sequential(*(ViTBlock(dim, heads, hidden, attention) for _ in range(2)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


# -- several inputs and outputs ----------------------------------------------------------------------------------


class MultiInputOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.vector = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.joint = nn.Linear(14, 10)
        self.kind = nn.Linear(10, 3)
        self.box = nn.Linear(10, 4)
        self.map = nn.Conv2d(6, 2, 1)

    def forward(self, image, vector):
        features = self.image(image)
        x = torch.cat([features.mean((2, 3)), self.vector(vector)], dim=-1)
        x = F.relu(self.joint(x))
        return {"kind": self.kind(x), "box": self.box(x)}, self.map(features)


class ReturnsFeatures(nn.Module):
    """The hidden channels are results too: none of them may go."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        hidden = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc(hidden.mean((2, 3))), hidden
