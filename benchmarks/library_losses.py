"""Detectors and segmenters of other libraries with the losses, and the matching of answers to objects, that come with them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.library_networks import Called, Network, Shape

_IMAGES: Shape = (2, 3, 96, 128)
_CLASSES = [[1, 0], [2]]
_BOXES = [
    [[0.3, 0.4, 0.2, 0.3], [0.7, 0.5, 0.4, 0.4]],
    [[0.5, 0.5, 0.6, 0.5]],
]  # centre and size, as shares of the image


def _in_dtype_of(image: Tensor, call: Callable[[], Any]) -> Any:
    """With it as the default: the libraries make tables and targets in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(image.dtype)
    try:
        return call()
    finally:
        torch.set_default_dtype(before)


def _transformers(
    name: str, config: str, kind: str, targets: Callable[[Tensor], dict[str, Any]], **options: Any
) -> Network:
    def build() -> nn.Module:
        library = import_module("transformers")
        made = {
            key: getattr(library, f"{value[0]}Config")(**value[1]) if key == "backbone_config" else value
            for key, value in options.items()
        }
        module = getattr(library, kind)(getattr(library, f"{config}Config")(num_labels=3, **made))
        return Called(module, lambda m, x: _in_dtype_of(x, lambda: m(pixel_values=x.contiguous(), **targets(x)).loss))

    return Network("transformers", f"{name} with its loss", _IMAGES, build)


def _boxes(image: Tensor) -> dict[str, Any]:
    return {
        "labels": [
            {"class_labels": torch.tensor(classes), "boxes": torch.tensor(boxes)}
            for classes, boxes in zip(_CLASSES, _BOXES, strict=True)
        ]
    }


def _masks(image: Tensor) -> dict[str, Any]:
    masks = torch.zeros(2, *image.shape[2:])
    masks[0, 10:50, 20:80] = 1
    masks[1, 60:90, 30:120] = 1
    return {"mask_labels": [masks, masks[:1]], "class_labels": [torch.tensor(classes) for classes in _CLASSES]}


def _pixels(image: Tensor) -> dict[str, Any]:
    numbers = torch.arange(image[:, 0].numel()) // 7 % 3
    return {"labels": numbers.view(image.shape[0], *image.shape[2:])}


def _of_transformers() -> list[Network]:
    detr: dict[str, Any] = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 6, "dropout": 0.0,
    }  # fmt: skip
    stages = {"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4}
    resnet = (
        "ResNet",
        {**stages, "embedding_size": 8, "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]},
    )
    all_stages = ["stage1", "stage2", "stage3", "stage4"]
    convnext = ("ConvNext", {**stages, "out_features": all_stages})
    swin = ("Swin", {"embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 2, 2, 4], "window_size": 4, "image_size": 64,
                     "drop_path_rate": 0.0, "out_features": all_stages})  # fmt: skip
    on_resnet = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": resnet, **detr}
    rt = {
        "backbone_config": ("RTDetrResNet", resnet[1]), "encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32],
        "encoder_layers": 1, "encoder_ffn_dim": 32, "encoder_attention_heads": 2, "d_model": 32, "num_queries": 12,
        "decoder_in_channels": [32] * 3, "decoder_ffn_dim": 32, "decoder_layers": 2, "decoder_attention_heads": 2,
        "num_denoising": 0, "freeze_backbone_batch_norms": False,
    }  # fmt: skip
    masks = {
        "backbone_config": swin, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_layers": 1,
        "encoder_feedforward_dim": 32, "dim_feedforward": 32, "decoder_layers": 3, "num_attention_heads": 2,
        "num_queries": 6, "train_num_points": 200,
    }  # fmt: skip
    sequence = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    pyramid = {"hidden_size": 16, "auxiliary_channels": 8, "pool_scales": [1, 2, 3, 6]}
    return [
        _transformers("DETR", "Detr", "DetrForObjectDetection", _boxes, **on_resnet),
        _transformers("Conditional DETR", "ConditionalDetr", "ConditionalDetrForObjectDetection", _boxes, **on_resnet),
        _transformers("Deformable DETR", "DeformableDetr", "DeformableDetrForObjectDetection", _boxes,
                      num_feature_levels=3, **on_resnet),
        _transformers("RT-DETR", "RTDetr", "RTDetrForObjectDetection", _boxes, **rt),
        _transformers("YOLOS", "Yolos", "YolosForObjectDetection", _boxes, image_size=[96, 128], patch_size=16,
                      num_detection_tokens=6, **sequence),
        _transformers("MaskFormer", "MaskFormer", "MaskFormerForInstanceSegmentation", _masks, backbone_config=swin,
                      fpn_feature_size=32, mask_feature_size=32, decoder_config={"model_type": "detr", **detr}),
        _transformers("Mask2Former", "Mask2Former", "Mask2FormerForUniversalSegmentation", _masks, **masks),
        _transformers("UperNet on ConvNeXt", "UperNet", "UperNetForSemanticSegmentation", _pixels,
                      backbone_config=convnext, auxiliary_in_channels=16, **pyramid),
        _transformers("UperNet on Swin", "UperNet", "UperNetForSemanticSegmentation", _pixels, backbone_config=swin,
                      auxiliary_in_channels=64, **pyramid),
    ]  # fmt: skip


def _batch(image: Tensor, kind: str) -> dict[str, Tensor]:
    """What ultralytics trains with: three objects, two in the first image."""
    boxes = torch.tensor([box for boxes in _BOXES for box in boxes])
    turned = torch.cat([boxes, torch.tensor([[0.1], [0.4], [0.2]])], 1)
    batch = {
        "img": image,
        "batch_idx": torch.tensor([0.0, 0.0, 1.0]),
        "cls": torch.tensor([[float(number)] for numbers in _CLASSES for number in numbers]),
        "bboxes": turned if kind == "OBB" else boxes,
    }
    if kind == "Segmentation":  # of an image the number of the object at each place, a quarter as fine
        batch["masks"] = torch.zeros(2, image.size(2) // 4, image.size(3) // 4)
        batch["masks"][:, 5:18, 4:20] = 1
    if kind == "Pose":
        points = torch.linspace(0.1, 0.9, 3 * 17 * 2).view(3, 17, 2)
        batch["keypoints"] = torch.cat([points, torch.full((3, 17, 1), 2.0)], 2)
    return batch


def _ultralytics(name: str, kind: str = "Detection", **options: Any) -> Network:
    def build() -> nn.Module:
        tasks, settings = import_module("ultralytics.nn.tasks"), import_module("ultralytics.cfg")
        module = getattr(tasks, f"{kind}Model")(cfg=f"{name}.yaml", ch=3, nc=4, verbose=False, **options)
        module.args = settings.get_cfg()  # the weights of the parts of its loss
        return Called(module, lambda m, x: _in_dtype_of(x, lambda: m(_batch(x, kind))[0].sum()))

    return Network("ultralytics", f"{name} with its loss", _IMAGES, build)


def networks_with_losses() -> list[Network]:
    """All of them, whether their libraries are installed or not."""
    return [
        *_of_transformers(),
        *(_ultralytics(name) for name in ("yolov5n", "yolov8n", "yolov10n", "yolo11n", "yolo12n", "yolo26n")),
        _ultralytics("yolov8n-seg", "Segmentation"),
        _ultralytics("yolov8n-pose", "Pose", data_kpt_shape=(17, 3)),
        _ultralytics("yolov8n-obb", "OBB"),
    ]
