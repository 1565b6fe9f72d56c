"""Layout: what is cut where, on meshes of any axes and sizes, and what it refuses."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtp import Layout, parallelize
from torchtp.testing import run_ranks


def _mesh(**axes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _cover_all(axes, spatial, data):
    layout = Layout(_mesh(**axes), spatial, data)
    return [_cover(layout, shape) for shape in SHAPES]


def _cover(layout, shape):
    """Every element of the image is some rank's, in the place the tile says, and comes back."""
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    cut = layout.shard(full)
    tile = full[layout.tile(shape)]
    assert isinstance(cut, DTensor) and cut.shape == full.shape and cut.device_mesh == layout.spatial_mesh
    assert torch.equal(cut.to_local(), tile) and tile.shape == layout.tile_shape(shape)
    assert torch.equal(layout.full(cut), full)
    again = layout.from_tile(tile.clone(), shape)
    assert again.placements == cut.placements and torch.equal(again.full_tensor(), full)
    assert layout.shard(cut) is cut
    marks = torch.zeros(shape)
    marks[layout.tile(shape)] = 1
    dist.all_reduce(marks, group=layout.spatial_group)
    assert torch.equal(marks, torch.ones(shape))
    assert layout.group.size() == dist.get_world_size() == layout.num_data * layout.num_shards
    return layout.data_rank, layout.spatial_rank


SHAPES = [(2, 3, 8, 12), (1, 2, 5, 7), (1, 1, 1, 2)]


@pytest.mark.parametrize(
    "axes, spatial, data",
    [
        ({"w": 1}, {"w": -1}, None),
        ({"w": 3}, {"w": -1}, None),
        ({"w": 3}, {"w": 3}, None),
        ({"h": 2, "w": 2}, {"h": -2, "w": -1}, None),
        ({"w": 2, "h": 2}, {"h": -2, "w": -1}, None),
        ({"dp": 2, "w": 2}, {"w": -1}, "dp"),
        ({"h": 2, "dp": 2}, {"h": -2}, "dp"),
        ({"h": 2, "dp": 1, "w": 2}, {"h": -2, "w": -1}, "dp"),
    ],
)
def test_tiles_cover_the_image(axes, spatial, data):
    size = torch.Size(axes.values()).numel()
    for ranks in zip(*run_ranks(_cover_all, size, axes, spatial, data), strict=True):
        assert len(set(ranks)) == size


def _gradient_of_a_full_image():
    layout = Layout(_mesh(w=3), {"w": -1})
    full = torch.randn(1, 2, 4, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 2, 4, 7, dtype=torch.float64)
    (layout.shard(full).to_local() * weight[layout.tile(full.shape)]).sum().backward()
    assert torch.equal(full.grad, weight)
    tile = full.detach()[layout.tile(full.shape)].clone().requires_grad_()
    layout.from_tile(tile, full.shape).to_local().square().sum().backward()
    assert torch.equal(tile.grad, 2 * tile)


def test_gradients_reach_the_full_image_and_the_tile():
    run_ranks(_gradient_of_a_full_image, 3)


def _memory_format():
    layout = Layout(_mesh(w=2), {"w": -1})
    full = torch.randn(2, 3, 4, 6).contiguous(memory_format=torch.channels_last)
    cut = layout.shard(full)
    return cut.stride() == full.stride(), cut.to_local().stride(1)


def test_the_whole_has_the_stride_order_of_the_parts():
    assert run_ranks(_memory_format, 2) == [(True, 1)] * 2


def _order_of_what_is_made(made):
    layout = Layout(_mesh(w=3), {"w": -1})
    full = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    if made == "by the layout":
        cut = layout.shard(full)
    elif made == "with a gradient":
        cut = layout.shard(full.requires_grad_())
    else:
        cut = distribute_tensor(full, layout.spatial_mesh, layout.placements(4))
    return torch.nn.functional.pad(cut, (1, 1)).stride()


@pytest.mark.parametrize("made", ["by the layout", "with a gradient", "by PyTorch"])
def test_all_ranks_give_one_order_to_what_is_made_of_a_tensor_that_one_has_nothing_of(made):
    assert run_ranks(_order_of_what_is_made, 3, made) == [(72, 1, 18, 3)] * 3


def _written_into_a_part():
    full = torch.zeros(1, 2, 1, 4)
    Layout(_mesh(h=2), {"h": -2}).shard(full).add_(1)
    return full.sum().item()


def test_what_is_written_into_a_part_is_not_in_the_image_that_it_was_cut_from():
    assert run_ranks(_written_into_a_part, 2) == [0, 0]


def _gradient_groups():
    whole = Layout(_mesh(data=2, w=2), {"w": -1}, "data")
    part = Layout(_mesh(data=2, w=2)["w"], {"w": -1})
    ranks = dist.get_process_group_ranks(whole.gradient_group)
    assert ranks == dist.get_process_group_ranks(whole.group) and whole.gradient_group is whole.gradient_group
    return whole.gradient_group is whole.group, part.gradient_group is part.group


def test_gradients_have_a_group_of_their_own_in_a_layout_of_the_world():
    assert run_ranks(_gradient_groups, 4) == [(False, True)] * 4


def _masks_of_other_ranks_of_dims():
    layout = Layout(_mesh(h=2, w=2), {"h": -2, "w": -1})
    return [layout.shard(torch.zeros(shape)).placements for shape in [(3, 8, 8), (8, 8), (1, 2, 3, 8, 8)]]


def test_negative_dims_fit_tensors_of_any_number_of_dims():
    for dims in run_ranks(_masks_of_other_ranks_of_dims, 4):
        assert dims == [(Shard(1), Shard(2)), (Shard(0), Shard(1)), (Shard(3), Shard(4))]


def _refused(axes, spatial, data):
    with pytest.raises(ValueError) as caught:
        Layout(_mesh(**axes), spatial, data)
    return str(caught.value)


@pytest.mark.parametrize(
    "axes, spatial, data, message",
    [
        ({"w": 2}, {"x": -1}, None, r"no axis 'x', its axes are \('w',\)"),
        ({"w": 2}, {"w": -1}, "dp", "no axis 'dp'"),
        ({"w": 2}, {}, None, "no axis cuts anything"),
        ({"w": 2}, {"w": 0}, None, "dim 0, the batch dim"),
        ({"w": 2}, {"w": 1}, None, "dim 1, the channel dim"),
        ({"w": 2}, {"w": -4}, None, "dim -4, the channel or batch dim"),
        ({"w": 2}, {"w": -1}, "w", "as spatial and as data"),
        ({"dp": 1, "w": 2}, {"w": -1}, None, "axis 'dp' of the mesh is neither spatial nor data"),
        ({"h": 1, "w": 2}, {"h": -1, "w": -1}, None, "two axes cut one dim"),
    ],
)
def test_layout_refuses(axes, spatial, data, message):
    texts = run_ranks(_refused, 2, axes, spatial, data)
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match=message):
        raise ValueError(texts[0])


def _refused_mesh():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="the mesh has no names for its axes"):
        Layout(mesh, {"w": -1})
    layout = Layout(_mesh(w=2), {"w": -1})
    with pytest.raises(ValueError, match="on meta can't be cut over a mesh of cpu devices"):
        layout.shard(torch.empty(1, 2, 3, 4, device="meta"))
    with pytest.raises(ValueError, match="cuts dim -1, which a tensor of 0 dims does not have"):
        layout.shard(torch.tensor(1.0))
    other = DTensor.from_local(torch.zeros(1, 1, 2, 2), init_device_mesh("cpu", (2,)), [Shard(3)], run_check=False)
    with pytest.raises(ValueError, match="not on the spatial mesh of this layout"):
        layout.shard(other)


def test_shard_refuses():
    run_ranks(_refused_mesh, 2)


def _tile_cut_for_another_shape(wrong):
    layout = Layout(_mesh(w=3), {"w": -1})
    width = 7 if dist.get_rank() in wrong else 12
    tile = torch.zeros(1, 2, 4, width)[layout.tile((1, 2, 4, width))]
    with pytest.raises(ValueError) as caught:
        layout.from_tile(tile, (1, 2, 4, 12))
    return str(caught.value)


@pytest.mark.parametrize("wrong", [[0], [2], [0, 1, 2]])
def test_a_tile_cut_for_another_shape_is_refused_on_all_ranks(wrong):
    for text in run_ranks(_tile_cut_for_another_shape, 3, wrong):
        assert "is not this rank's part of an image of shape (1, 2, 4, 12)" in text


def _disagree_on_the_global_shape():
    layout = Layout(_mesh(w=2), {"w": -1})
    shape = (1, 1, 4, 8 + dist.get_rank())
    with pytest.raises(ValueError) as caught:
        layout.from_tile(torch.zeros(layout.tile_shape(shape)), shape)
    return str(caught.value)


def test_ranks_that_disagree_on_the_global_shape_are_refused():
    first, second = run_ranks(_disagree_on_the_global_shape, 2)
    assert first == second and "rank 0 has an image of shape (1, 1, 4, 8)" in first


def _no_shape(shape):
    layout = Layout(_mesh(w=2), {"w": -1})
    with pytest.raises(ValueError) as caught:
        layout.from_tile(torch.zeros(1, 1, 4, 4), shape if dist.get_rank() == 1 else (1, 1, 4, 8))
    return str(caught.value)


@pytest.mark.parametrize("shape", [None, 8, (1, 1, 4, "8")])
def test_what_is_no_shape_on_one_rank_is_refused_on_all(shape):
    first, second = run_ranks(_no_shape, 2, shape, timeout=20)
    assert first == second and f"but it is {shape!r}" in first and "on rank 1" in first


def test_chunks_are_those_of_torch_chunk():
    results = run_ranks(_widths, 4)
    for extent, widths in zip(range(1, 20), zip(*results, strict=True), strict=True):
        chunks = [part.numel() for part in torch.zeros(extent).chunk(4)]
        assert list(widths) == list(itertools.islice(itertools.chain(chunks, itertools.repeat(0)), 4))


def _widths():
    layout = Layout(_mesh(w=4), {"w": -1})
    return [layout.tile_shape((1, 1, extent))[-1] for extent in range(1, 20)]


def _tiles_in_two_formats(shape):
    layout = Layout(_mesh(w=2), {"w": -1})
    tile = torch.zeros(layout.tile_shape(shape))
    tile = tile.contiguous(memory_format=torch.channels_last) if dist.get_rank() else tile
    try:
        return layout.from_tile(tile, shape).stride()
    except ValueError as error:
        return str(error)


def test_tiles_in_two_memory_formats_are_refused_but_where_few_rows_tell_none():
    first, second = run_ranks(_tiles_in_two_formats, 2, (1, 3, 4, 8))
    assert first == second and "rank 1 has an image in channels_last of shape (1, 3, 4, 8)" in first
    first, second = run_ranks(_tiles_in_two_formats, 2, (1, 3, 4, 3))
    assert first == second == (36, 12, 3, 1)


def _shapes_that_are_none():
    layout = Layout(_mesh(h=2, w=2), {"h": 2, "w": -2})
    with pytest.raises(ValueError, match="two axes cut one dim of a tensor of 4 dims"):
        layout.shard(torch.zeros(1, 3, 8, 8))
    assert layout.tile_shape((1, 3, 8, 8, 8)) == (1, 3, 4, 4, 8)
    for shape in ((1, 3, 8, -8, 8), (1, 3, 8, 4.5, 8)):
        with pytest.raises(ValueError, match="whole numbers from 0 on"):
            layout.tile(shape)
    with pytest.raises(TypeError, match="a tensor: pass its shape"):
        layout.tile(torch.zeros(1, 3, 8, 8, 8))
    with pytest.raises(ValueError) as caught:
        layout.from_tile([1] if dist.get_rank() == 1 else torch.zeros(1, 3, 4, 4, 8), (1, 3, 8, 8, 8))
    return str(caught.value)


def test_what_is_no_shape_and_no_tile_is_refused():
    told = run_ranks(_shapes_that_are_none, 4)
    assert len(set(told)) == 1 and told[0] == "a Layout cuts tensors, not a list (on rank 1)", told


def _groups_of_gradients():
    """Of two models, asked for in another order on each rank: as threads may come to their first forwards."""
    layouts = [Layout(_mesh(h=2), {"h": -2}) for _ in range(2)]
    for layout in layouts:
        parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), layout)
    for layout in layouts if dist.get_rank() == 0 else reversed(layouts):
        assert layout.gradient_group.size() == 2
    return [layout.gradient_group.group_name for layout in layouts]


def test_groups_of_gradients_are_made_in_the_order_of_models():
    first, second = run_ranks(_groups_of_gradients, 2)
    assert first == second


def _lives_with_other_ranks():
    """Meshes of later lives are equal to those of the first, but this process holds another part, and groups have other names."""
    store, rank, size = next(dist.rendezvous("env://"))
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 1, 5, 5, generator=generator, dtype=torch.float64)
    weights = [torch.ones(1, 1, 1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for life in range(size):
        dist.init_process_group(
            "torchtp", store=dist.PrefixStore(str(life), store), rank=(rank + life // 2) % size, world_size=size
        )
        for _ in range(life):
            dist.new_group()
        layout = Layout(_mesh(h=2, w=size // 2), {"h": -2, "w": -1})
        for weight, x in zip(weights, (layout.shard(image), image), strict=True):
            weight.grad = None
            y = F.max_pool2d((x * weight).tanh(), 3, 1, 1)
            (y.sum((2, 3)).square().sum() + y.mean().sin() + y.flatten(1).sum(1).cos().sum()).backward()
        dist.all_reduce(weights[0].grad)  # of each rank its contribution to the mean
        torch.testing.assert_close(weights[0].grad / size, weights[1].grad, rtol=1e-12, atol=1e-12)
        dist.destroy_process_group()


def test_processes_may_begin_again_with_other_ranks():
    run_ranks(_lives_with_other_ranks, 4, backend=None)
