"""ConvNeXt-T to XL on synthetic images of any shape: seconds an iteration and memory a rank.

    torchrun --nproc-per-node 2 examples/train_convnext.py --network tiny --shape 2,3,512,1024
    torchrun --nproc-per-node 8 examples/train_convnext.py --network xlarge --shape 7,3,512,2048 --mesh w=8 --device cuda
    torchrun --nproc-per-node 8 examples/train_convnext.py --mesh data=2,h=2,w=2 --checkpoint --amp

--shape is the batch of one data rank. The table's last column is the loss, so that two meshes can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fused import FusedBlock, channel_norm
from launching import (
    image_shape,
    make_layout,
    median,
    mesh_sizes,
    positive_float,
    print_table,
    spatial_groups,
    start_process_group,
)
from networks import Classifier, ConvNeXt, draw_paths
from tqdm import tqdm

import torchtp
from torchtp.flags import positive_int
from torchtp.host_memory import keep_freed_memory
from torchtp.planning.measure import SavedBytes, exchanged_bytes

NETWORKS = {
    "tiny": ([3, 3, 9, 3], [96, 192, 384, 768]),
    "small": ([3, 3, 27, 3], [96, 192, 384, 768]),
    "base": ([3, 3, 27, 3], [128, 256, 512, 1024]),
    "large": ([3, 3, 27, 3], [192, 384, 768, 1536]),
    "xlarge": ([3, 3, 27, 3], [256, 512, 1024, 2048]),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="tiny", help="ConvNeXt of which size (default tiny)")
    parser.add_argument(
        "--shape", type=image_shape, default="1,3,512,1024", help="N,C,H,W of one data rank (default 1,3,512,1024)"
    )
    parser.add_argument(
        "--mesh", type=mesh_sizes, help="sizes of the mesh axes data, h, w, like data=2,w=4 (default: all ranks on w)"
    )
    parser.add_argument(
        "--steps", type=positive_int, default=5, help="timed iterations after two of warm-up (default 5)"
    )
    parser.add_argument("--checkpoint", action="store_true", help="recompute the blocks in backward")
    parser.add_argument(
        "--layers", choices=["torch", "torchtp"], default="torch", help="of torch.nn, or torchtp's fused ones"
    )
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--drop-path", type=float, default=0.1, help="largest DropPath probability (default 0.1)")
    parser.add_argument("--lr", type=positive_float, default=1e-4, help="learning rate of Adam (default 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, images and paths (default 0)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the ranks (default cpu)")
    parser.add_argument("--backend", default="torchtp", help="torch.distributed backend (default torchtp)")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return parser.parse_args()


def memory_bytes(device: str) -> int:
    """Peak of this process: allocated device memory on CUDA, resident memory on the CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    args = parse_args()
    keep_freed_memory()
    start_process_group(args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda needs a GPU, and there is none here: leave it out")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    layout = make_layout(args.mesh, args.device)
    depths, dims = NETWORKS[args.network]
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        layers = {"block": FusedBlock, "norm": channel_norm} if args.layers == "torchtp" else {}
        encoder = ConvNeXt(depths, dims, args.shape[1], args.drop_path, args.checkpoint, **layers)
        network = Classifier(encoder, dims[-1])
    model = torchtp.parallelize(network, layout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    autocast = torch.autocast(args.device, torch.bfloat16) if args.amp else contextlib.nullcontext()

    global_batch = args.shape[0] * layout.num_data
    mine = slice(layout.data_rank * args.shape[0], (layout.data_rank + 1) * args.shape[0])
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.randn(global_batch, *args.shape[1:], generator=generator)[mine].to(args.device)
    labels = torch.randint(0, 1000, (global_batch,), generator=generator)[mine].to(args.device)
    groups = spatial_groups(layout)
    seconds, kept, loss_value = [], 0, 0.0
    title = " x ".join(f"{name}={layout.mesh.size(axis)}" for axis, name in enumerate(layout.mesh.mesh_dim_names))
    sent = 0
    for step in tqdm(range(args.steps + 2), desc=f"ConvNeXt-{args.network} {title}", disable=rank > 0, file=sys.stdout):
        start, before = time.perf_counter(), exchanged_bytes(groups)
        draw_paths(model, generator, global_batch, mine, images.dtype)
        # The second warm-up iteration is watched: it looks at every saved tensor.
        watch = SavedBytes(model.parameters()) if step == 1 else contextlib.nullcontext()
        with watch, autocast:
            loss = F.cross_entropy(full(model(images)).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_value = loss.item()
        seconds.append(time.perf_counter() - start)
        sent = exchanged_bytes(groups) - before
        kept = watch.num_bytes if isinstance(watch, SavedBytes) else kept

    ranks: list[dict] = [{} for _ in range(world)]
    mine_now = {
        "kept_bytes": kept,
        "peak_bytes": memory_bytes(args.device),
        "exchanged_bytes": sent,
        "seconds": median(seconds[2:]),
        "loss": loss_value,
    }
    dist.all_gather_object(ranks, mine_now)
    dist.destroy_process_group()
    if rank > 0:
        return 0
    rows = [["rank", "iteration", "kept for backward", "peak memory", "exchanged an iteration", "loss"]]
    for number, entry in enumerate(ranks):
        rows.append(
            [
                str(number),
                f"{entry['seconds'] * 1e3:.0f} ms",
                f"{entry['kept_bytes'] / 2**20:.1f} MiB",
                f"{entry['peak_bytes'] / 2**20:.0f} MiB",
                f"{entry['exchanged_bytes'] / 2**20:.2f} MiB",
                f"{entry['loss']:.6f}",
            ]
        )
    print()
    print_table(rows)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "network": args.network,
            "layers": args.layers,
            "shape": args.shape,
            "mesh": title,
            "torch": torch.__version__,
            "ranks": ranks,
        }
        args.out.write_text(json.dumps(figures, indent=1))
    return 0


def full(output: torch.Tensor) -> torch.Tensor:
    return output.full_tensor() if hasattr(output, "full_tensor") else output


if __name__ == "__main__":
    sys.exit(main())
