"""Depth from a stereo pair: a ConvNeXt trains on one real image cut over several ranks.

    python examples/train_disparity.py                                                one rank
    torchrun --nproc-per-node 2 examples/train_disparity.py --check                   two, compared with one
    torchrun --nproc-per-node 4 examples/train_disparity.py --mesh h=2,w=2            a 2 x 2 cut
    torchrun --nproc-per-node 4 examples/train_disparity.py --mesh data=2,w=2         two samples, each cut in two

The pair and its measured disparity come with scikit-image (`stereo_motorcycle`, Middlebury 2014). Squares of the image
are never trained on; the end-point error there is reported as "unseen". Writes a picture and a JSON file to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launching import (
    make_layout,
    median,
    mesh_sizes,
    positive_float,
    print_table,
    spatial_groups,
    start_process_group,
)
from networks import DisparityNet, draw_paths
from torch import Tensor, nn
from tqdm import tqdm

import torchtp
from torchtp.flags import positive_int
from torchtp.host_memory import keep_freed_memory
from torchtp.planning.measure import SavedBytes, exchanged_bytes

NETWORKS = {
    "tiny": ([1, 1, 2], [16, 32, 64]),
    "small": ([2, 2, 2], [24, 48, 96]),
    "base": ([3, 3, 9, 3], [48, 96, 192, 384]),
}
UNIT = 32.0  # pixels of disparity the network calls 1
SQUARE = 60  # side of the squares left out of training, at scale 1
# In less than double precision rounding alone moves what Adam does to parameters near zero, so there only the loss decides.
MAX_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 5e-2}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="tiny", help="size of the network (default tiny)")
    parser.add_argument(
        "--scale", type=positive_float, default=1.0, help="enlarges the image by this factor (default 1)"
    )
    parser.add_argument("--steps", type=positive_int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--batch", type=positive_int, default=1, help="samples a data rank takes each step (default 1)")
    parser.add_argument(
        "--mesh", type=mesh_sizes, help="sizes of the mesh axes data, h, w, like h=1,w=2 (default: all ranks on w)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32", "bfloat16"],
        default="float32",
        help="of the computation; bfloat16 by autocast (default float32)",
    )
    parser.add_argument("--checkpoint", action="store_true", help="recompute the blocks in backward")
    parser.add_argument("--drop-path", type=float, default=0.1, help="largest DropPath probability (default 0.1)")
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="peak learning rate of AdamW (default 3e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, lightings and paths (default 0)")
    parser.add_argument("--backend", default="torchtp", help="torch.distributed backend (default torchtp)")
    parser.add_argument(
        "--check", action="store_true", help="train on one rank too and compare; exit status 1 if they differ"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the picture and the figures (default out)"
    )
    return parser.parse_args()


@dataclass
class Scene:
    """The stereo pair on one device: images scaled to about [-2, 2], disparity in units of UNIT pixels."""

    pair: Tensor  # [1, 6, H, W]
    truth: Tensor  # [1, 1, H, W]
    seen: Tensor  # 1 where the truth is valid and trained on
    unseen: Tensor  # 1 where it is valid and only evaluated

    @staticmethod
    def load(scale: float, dtype: torch.dtype) -> Scene:
        from skimage.data import stereo_motorcycle

        left, right, disparity = stereo_motorcycle()
        pair = torch.cat([torch.from_numpy(image).permute(2, 0, 1) for image in (left, right)])[None].to(dtype)
        pair = (pair / 255 - 0.45) / 0.25
        truth = torch.from_numpy(disparity)[None, None].to(dtype)
        if min(pair.shape[-2:]) * scale < 1:
            sys.exit(f"--scale {scale:g} leaves no pixel of a pair of {pair.shape[-2]} x {pair.shape[-1]}")
        if scale != 1:
            # A disparity is a length in pixels, so it grows with the image.
            pair = F.interpolate(pair, scale_factor=scale, mode="bilinear", align_corners=False)
            truth = F.interpolate(truth, size=pair.shape[-2:], mode="nearest") * scale
        valid = truth.isfinite()
        rows, columns = (torch.arange(extent) // max(1, round(SQUARE * scale)) for extent in truth.shape[-2:])
        left_out = ((rows[:, None] * 2 + columns[None, :]) % 5 == 0)[None, None]
        return Scene(
            pair, truth.nan_to_num(posinf=0) / UNIT, (valid & ~left_out).to(dtype), (valid & left_out).to(dtype)
        )

    def samples(self, generator: torch.Generator, global_batch: int, samples: slice) -> Tensor:
        """The pair under as many lightings as the global batch has samples; the part `samples` of them."""
        contrast = 1 + 0.1 * torch.randn(global_batch, 1, 1, 1, generator=generator, dtype=torch.float64)
        brightness = 0.1 * torch.randn(global_batch, 1, 1, 1, generator=generator, dtype=torch.float64)
        return self.pair * contrast[samples].to(self.pair.dtype) + brightness[samples].to(self.pair.dtype)


@dataclass
class History:
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # end-point error where trained, pixels
    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    exchanged_bytes: int = 0  # a step


def train(
    args: argparse.Namespace,
    scene: Scene,
    layout: torchtp.Layout | None,
    data: tuple[int, int],
    title: str,
    quiet: bool,
) -> tuple[nn.Module, History, Tensor]:
    """Trains on `layout`, or on this process alone with layout None. `data`: (data rank, number of data ranks).

    Returns the network, what happened, and the prediction [H, W] in pixels.
    """
    dtype = getattr(torch, args.dtype)
    depths, dims = NETWORKS[args.network]
    torch.manual_seed(args.seed)
    network = DisparityNet(depths, dims, args.drop_path, args.checkpoint).to(scene.pair.dtype)
    model = torchtp.parallelize(network, layout) if layout else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.2)
    autocast = torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext()

    global_batch = args.batch * data[1]
    mine = slice(data[0] * args.batch, (data[0] + 1) * args.batch)
    shard = layout.shard if layout else lambda tensor: tensor
    truth, seen = shard(scene.truth), shard(scene.seen)
    num_seen = scene.seen.sum()
    generator = torch.Generator().manual_seed(args.seed)
    groups = spatial_groups(layout)
    history = History()

    model.train()
    progress = tqdm(range(args.steps), desc=title, disable=quiet, file=sys.stdout, dynamic_ncols=True)
    for step in progress:
        start, sent = time.perf_counter(), exchanged_bytes(groups)
        pair = scene.samples(generator, global_batch, mine)
        draw_paths(model, generator, global_batch, mine, scene.pair.dtype)
        # Only the last step is watched: it looks at every saved tensor.
        watch = SavedBytes(model.parameters()) if step == args.steps - 1 else contextlib.nullcontext()
        with watch, autocast:
            prediction = model(pair)
            error = F.smooth_l1_loss(prediction, truth.expand(prediction.shape), reduction="none", beta=0.1)
            loss = (error * seen).sum() / (num_seen * args.batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            distance = ((prediction.detach() - truth).abs() * seen).sum() / (num_seen * args.batch)
        history.losses.append(loss.item())
        history.errors.append(distance.item() * UNIT)
        history.seconds.append(time.perf_counter() - start)
        history.exchanged_bytes = exchanged_bytes(groups) - sent
        if isinstance(watch, SavedBytes):
            history.saved_bytes = watch.num_bytes
        progress.set_postfix(
            loss=f"{history.losses[-1]:.4f}", error=f"{history.errors[-1]:.2f}px", s=f"{history.seconds[-1]:.2f}"
        )
    model.eval()
    with torch.no_grad():
        prediction = model(scene.pair)
    if layout:
        prediction = prediction.full_tensor()
    return network, history, prediction[0, 0].float() * UNIT


def end_point_error(prediction: Tensor, scene: Scene, mask: Tensor) -> float:
    """Mean distance in pixels between prediction and truth where `mask` is 1."""
    distance = (prediction - scene.truth[0, 0].float() * UNIT).abs() * mask[0, 0].float()
    return (distance.sum() / mask.sum()).item()


def largest_difference(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, relative to the largest absolute value of the reference."""
    return ((value - reference).abs().max() / reference.abs().max().clamp_min(1e-300)).item()


def most(differences: list[float]) -> float:
    """The largest one; NaN if one is, which Python's max passes over."""
    return torch.tensor(differences, dtype=torch.float64).max().item()


def draw(
    path: Path, scene: Scene, prediction: Tensor, layout: torchtp.Layout, history: History, reference: History | None
) -> None:
    """Image with cut lines and unseen squares, truth, prediction, loss curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((image, truth), (predicted, curve)) = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    height, width = scene.truth.shape[-2:]
    image.imshow((scene.pair[0, :3].permute(1, 2, 0).float() * 0.25 + 0.45).clamp(0, 1))
    image.contour(scene.unseen[0, 0], levels=[0.5], colors="white", linewidths=0.6)
    mesh = layout.spatial_mesh
    for axis, name in enumerate(mesh.mesh_dim_names):
        extent = height if name == "h" else width
        each = -(-extent // mesh.size(axis))
        for cut in range(each, extent, each):
            (image.axhline if name == "h" else image.axvline)(cut - 0.5, color="red", linewidth=1.5)
    image.set_title(f"left image {height} x {width}, cut (red), never trained on (white)")
    known = scene.truth[0, 0].float() * UNIT
    known[(scene.seen + scene.unseen)[0, 0] == 0] = float("nan")
    limits = {"vmin": 0, "vmax": known.nan_to_num().max().item(), "cmap": "turbo"}
    truth.imshow(known, **limits)
    truth.set_title("measured disparity, pixels")
    shown = predicted.imshow(prediction, **limits)
    predicted.set_title("predicted disparity, pixels")
    figure.colorbar(shown, ax=[truth, predicted], shrink=0.6)
    curve.plot(
        history.losses, label=f"{dist.get_world_size()} rank(s)" if dist.is_initialized() else "this run", linewidth=3
    )
    if reference:
        curve.plot(reference.losses, "k--", label="one rank", linewidth=1)
    curve.set(xlabel="step", ylabel="loss", yscale="log", title="training")
    curve.legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> int:
    args = parse_args()
    keep_freed_memory()
    start_process_group(args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = make_layout(args.mesh)
    scene = Scene.load(args.scale, torch.float64 if args.dtype == "float64" else torch.float32)
    data = (layout.data_rank, layout.num_data)
    title = " x ".join(f"{name}={layout.mesh.size(axis)}" for axis, name in enumerate(layout.mesh.mesh_dim_names))
    network, history, prediction = train(args, scene, layout, data, title, quiet=rank > 0)

    # The loss of the global batch is the mean over the data ranks.
    losses = torch.tensor(history.losses, dtype=torch.float64)
    dist.all_reduce(losses, op=dist.ReduceOp.AVG, group=layout.group)
    history.losses = losses.tolist()
    mine = {
        "rank": rank,
        "tile": [[part.start, part.stop] for part in layout.tile(tuple(scene.pair.shape))[-2:]],
        "saved_bytes": history.saved_bytes,
        "exchanged_bytes_per_step": history.exchanged_bytes,
        "seconds_per_step": median(history.seconds),
    }
    ranks: list[dict] = [{} for _ in range(world)]
    dist.all_gather_object(ranks, mine)
    num_data = layout.num_data
    if rank > 0:
        dist.destroy_process_group()
        return 0

    reference = None
    result = {
        "mesh": title,
        "network": args.network,
        "dtype": args.dtype,
        "steps": args.steps,
        "ranks": ranks,
        "error_seen_px": end_point_error(prediction, scene, scene.seen),
        "error_unseen_px": end_point_error(prediction, scene, scene.unseen),
        "losses": history.losses,
    }
    if args.check:
        single = argparse.Namespace(**{**vars(args), "batch": args.batch * num_data})
        trained, reference, _ = train(single, scene, None, (0, 1), "one rank", quiet=False)
        result["loss_differences"] = [
            abs(a - b) / abs(b) for a, b in zip(history.losses, reference.losses, strict=True)
        ]
        result["parameter_difference"] = most(
            [
                largest_difference(ours.detach(), theirs.detach())
                for ours, theirs in zip(network.parameters(), trained.parameters(), strict=True)
            ]
        )
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "disparity.png"
    draw(picture, scene, prediction, layout, history, reference)
    dist.destroy_process_group()

    rows = [["rank", "rows", "columns", "kept for backward", "exchanged a step", "step"]]
    for entry in ranks:
        (top, bottom), (left, right) = entry["tile"]
        rows.append(
            [
                str(entry["rank"]),
                f"{top}..{bottom}",
                f"{left}..{right}",
                f"{entry['saved_bytes'] / 2**20:.1f} MiB",
                f"{entry['exchanged_bytes_per_step'] / 2**10:.1f} KiB",
                f"{entry['seconds_per_step'] * 1e3:.0f} ms",
            ]
        )
    if reference:
        rows.append(
            [
                "one rank",
                f"0..{scene.pair.shape[-2]}",
                f"0..{scene.pair.shape[-1]}",
                f"{reference.saved_bytes / 2**20:.1f} MiB",
                "-",
                f"{median(reference.seconds) * 1e3:.0f} ms",
            ]
        )
    print()
    print_table(rows)
    print(
        f"\nend-point error: {result['error_seen_px']:.2f} px where trained, {result['error_unseen_px']:.2f} px unseen"
    )
    print(f"picture: {picture}")
    (args.out / "disparity.json").write_text(json.dumps(result, indent=1))
    if not args.check:
        return 0
    bound = MAX_DIFFERENCE[getattr(torch, args.dtype)]
    loss_difference, parameter_difference = most(result["loss_differences"]), result["parameter_difference"]
    same = loss_difference < bound and (parameter_difference < bound or args.dtype != "float64")
    print(
        f"largest relative difference to one rank over {args.steps} steps: loss {loss_difference:.1e}, "
        f"parameters {parameter_difference:.1e} (allowed {bound:.0e})"
    )
    print("SAME RESULT as on one rank" if same else "DIFFERENT RESULT from one rank")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
