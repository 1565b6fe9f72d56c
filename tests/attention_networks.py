"""Small networks of the kinds that attend over an image's pixels, as their papers' code is written: plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Multi-head attention of a sequence; keys and values of a coarser image where `reduction` > 1 (PVT, SegFormer)."""

    def __init__(self, channels, reduction=1, fused=True):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(channels, n * channels) for n in (1, 2, 1))
        self.reduce = nn.Conv2d(channels, channels, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(channels)
        self.fused = fused

    def forward(self, x, height=0, width=0):
        n, length, channels = x.shape
        q = self.q(x).reshape(n, length, 2, channels // 2).permute(0, 2, 1, 3)
        if self.reduce is not None:
            image = x.permute(0, 2, 1).reshape(n, channels, height, width)
            x = self.norm(self.reduce(image).reshape(n, channels, -1).permute(0, 2, 1))
        k, v = self.kv(x).reshape(n, -1, 2, 2, channels // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * (channels // 2) ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, length, channels))


class Segmenting(nn.Module):
    """SegFormer's block: attention to a coarser image, then an MLP with a depthwise convolution between its layers."""

    def __init__(self, fused=True):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 3, 2, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.attention = Attention(8, 2, fused)
        self.expand, self.project = nn.Linear(8, 16), nn.Linear(16, 8)
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        x = self.embed(x)
        n, _, height, width = x.shape
        x = self.norms[0](x.flatten(2).transpose(1, 2))
        x = x + self.attention(self.norms[1](x), height, width)
        y = self.expand(self.norms[2](x)).transpose(1, 2).view(n, 16, height, width)
        x = x + self.project(F.gelu(self.depthwise(y).flatten(2).transpose(1, 2)))
        image = self.head(x.transpose(1, 2).reshape(n, 8, height, width))
        return {"image": image, "depth": image.squeeze(1)}


class Windows(nn.Module):
    """Swin's block: attention inside of shifted windows."""

    def __init__(self, size=4):
        super().__init__()
        self.embed, self.norm, self.attention = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), Attention(8)
        self.size = size

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        n, height, width, channels = x.shape
        rows, columns, size = height // self.size, width // self.size, self.size
        y = self.norm(x).roll((-2, -2), (1, 2)).view(n, rows, size, columns, size, channels)
        y = self.attention(y.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels))
        y = y.view(n, rows, columns, size, size, channels).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        return (x + y.roll((2, 2), (1, 2))).permute(0, 3, 1, 2)


class Axial(nn.Module):
    """Attention along rows, then along columns."""

    def __init__(self):
        super().__init__()
        self.embed, self.along_rows, self.along_columns = nn.Conv2d(3, 8, 1), Attention(8), Attention(8, fused=False)

    def forward(self, x):
        x = self.embed(x)
        n, channels, height, width = x.shape
        y = self.along_rows(x.permute(0, 2, 3, 1).reshape(n * height, width, channels)).view(n, height, width, channels)
        z = self.along_columns(y.permute(0, 2, 1, 3).reshape(n * width, height, channels))
        return x + z.view(n, width, height, channels).permute(0, 3, 2, 1)


class Detecting(nn.Module):
    """DETR's: an encoder over all pixels with a class token, a decoder for a few queries."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.0)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        pixels = self.embed(x).flatten(2).transpose(1, 2)
        n = pixels.size(0)
        memory = self.encoder(torch.cat([self.token.expand(n, -1, -1), pixels], 1))
        found = self.decoder(self.queries.unsqueeze(1).repeat(1, n, 1), memory[:, 1:].transpose(0, 1))
        return {"boxes": self.head(found), "class": self.head(memory[:, 0])}


class NonLocal(nn.Module):
    """Every pixel a mean of all others (with keys of a pooled image), of all channels, and of a linear attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 6, 3, padding=1)
        self.qkv = nn.Conv2d(6, 18, 1)
        self.gamma = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = self.embed(x)
        n, channels, height, width = x.shape
        q, k, v = self.qkv(x).chunk(3, 1)
        pooled_k, pooled_v = F.max_pool2d(k, 2).flatten(2), F.max_pool2d(v, 2).flatten(2)
        attention = torch.bmm(q.flatten(2).transpose(1, 2), pooled_k).softmax(-1)
        x = x + self.gamma * torch.bmm(pooled_v, attention.permute(0, 2, 1)).view(n, channels, height, width)
        flat = x.view(n, channels, -1)
        energy = torch.bmm(flat, flat.transpose(1, 2))
        energy = energy.max(-1, keepdim=True)[0].expand_as(energy) - energy
        x = x + torch.bmm(energy.softmax(-1), flat).view(x.shape)
        context = torch.einsum("bcl,bdl->bcd", k.flatten(2).softmax(-1), v.flatten(2))
        return x + torch.einsum("bcd,bcl->bdl", context, q.flatten(2).softmax(1)).reshape(x.shape)


class CrissCross(nn.Module):
    """Every pixel attends to its row and its column; to another image by a correlation of all pairs (RAFT)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 6, 3, padding=1)
        self.qkv = nn.Conv2d(6, 18, 1)

    def forward(self, x):
        x = self.embed(x)
        n, channels, height, width = x.shape
        q, k, v = self.qkv(x).chunk(3, 1)
        qh, kh, vh = (t.permute(0, 3, 1, 2).contiguous().view(n * width, channels, height) for t in (q, k, v))
        qw, kw, vw = (t.permute(0, 2, 1, 3).contiguous().view(n * height, channels, width) for t in (q, k, v))
        energy_h = torch.bmm(qh.permute(0, 2, 1), kh).view(n, width, height, height).permute(0, 2, 1, 3)
        energy_w = torch.bmm(qw.permute(0, 2, 1), kw).view(n, height, width, width)
        weights = torch.cat([energy_h, energy_w], 3).softmax(3)
        of_h = weights[..., :height].permute(0, 2, 1, 3).contiguous().view(n * width, height, height)
        of_w = weights[..., height:].contiguous().view(n * height, width, width)
        y = torch.bmm(vh, of_h.permute(0, 2, 1)).view(n, width, channels, height).permute(0, 2, 3, 1)
        y = y + torch.bmm(vw, of_w.permute(0, 2, 1)).view(n, height, channels, width).permute(0, 2, 1, 3)
        small = F.avg_pool2d(y, 4)
        pairs = torch.matmul(small.flatten(2).transpose(1, 2), small.flip(3).flatten(2))
        volume = F.avg_pool2d(pairs.view(-1, 1, *small.shape[2:]), 2)
        return x + y, volume.view(n, *small.shape[2:], -1).permute(0, 3, 1, 2)


class InWindows(nn.Module):
    """A convolutional network inside of windows, which are images of their own then."""

    def __init__(self, size=4):
        super().__init__()
        self.size = size
        self.embed, self.convolution = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 1, 1, padding_mode="reflect")
        self.batch, self.group, self.instance = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x):
        x = self.embed(x)
        n, channels, height, width = x.shape
        rows, columns, size = height // self.size, width // self.size, self.size
        y = x.view(n, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, size, size)
        y = self.group(self.batch(self.convolution(y)).relu()) + self.instance(y)
        y = y + F.interpolate(F.avg_pool2d(y, 2), scale_factor=2, mode="bilinear")
        y = y + F.interpolate(F.max_pool2d(y, 2), scale_factor=2)
        y = F.adaptive_avg_pool2d(F.pad(y, (1, 0, 0, 1), mode="replicate"), size)
        y = y + F.unfold(y, 3, padding=1).view(-1, channels, 9, size, size).mean(2)
        y = y.view(n, rows, columns, channels, size, size).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
        return x + y


NETWORKS = {
    "segmenting": Segmenting,
    "segmenting_unfused": lambda: Segmenting(fused=False),
    "windows": Windows,
    "axial": Axial,
    "detecting": Detecting,
    "non_local": NonLocal,
    "criss_cross": CrissCross,
    "in_windows": InWindows,
}
