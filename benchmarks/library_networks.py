"""Networks of libraries that people train with, small ones, and losses: what `benchmarks.networks` compares. Built when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """How to make a module that takes one image of `shape`."""

    library: str  # as pip knows it
    name: str
    shape: Shape
    build: Callable[[], nn.Module]
    tolerance: float = 1e-6  # of the largest number, in float64


class Called(nn.Module):
    """A module behind the arguments and results that are its own."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Any]):
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, image: Tensor) -> Any:
        return self._call(self.module, image)


class AfterConvolution(nn.Module):
    """A loss or a filter of what a convolution makes of the image, and of the image itself, both between 0 and 1."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)
        self.loss = loss

    def forward(self, image: Tensor) -> Any:
        return self.loss(torch.sigmoid(self.convolution(image)), image)


def _of(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(module), name)(**options)


def _segmentation_models() -> list[Network]:
    made = []
    for name, encoder in [
        ("Unet", "resnet18"), ("Unet", "mit_b0"), ("Unet", "timm-efficientnet-b0"), ("UnetPlusPlus", "mobilenet_v2"),
        ("MAnet", "resnet18"), ("Linknet", "resnet18"), ("FPN", "efficientnet-b0"), ("PSPNet", "resnet18"),
        ("PAN", "resnet18"), ("DeepLabV3", "resnet18"), ("DeepLabV3Plus", "resnet18"), ("UPerNet", "resnet18"),
        ("Segformer", "mit_b0"),
    ]:  # fmt: skip
        build = _of("segmentation_models_pytorch", name, encoder_name=encoder, encoder_weights=None, classes=2)
        made.append(Network("segmentation-models-pytorch", f"{name}, {encoder}", (2, 3, 128, 128), build))
    return made


def _monai() -> list[Network]:
    small = {"in_channels": 1, "out_channels": 2}
    unet = {"channels": (4, 8, 16), "strides": (2, 2)}
    flat, solid = {"spatial_dims": 2, **small}, {"spatial_dims": 3, **small}
    entries: list[tuple[str, Shape, dict[str, Any]]] = [
        ("UNet", (1, 1, 64, 64), {**flat, **unet, "num_res_units": 2}),
        ("UNet", (1, 1, 16, 32, 32), {**solid, **unet, "num_res_units": 2}),
        ("DynUNet", (1, 1, 64, 64), {**flat, "kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}),
        ("SegResNet", (1, 1, 16, 32, 32), {**solid, "init_filters": 8}),
        ("AttentionUnet", (1, 1, 64, 64), {**flat, **unet}),
        ("BasicUNetPlusPlus", (1, 1, 64, 64), {**flat, "features": (4, 4, 8, 8, 16, 4)}),
        ("VNet", (1, 1, 32, 32, 32), solid),
        ("SwinUNETR", (1, 1, 64, 64), {**flat, "feature_size": 12}),
        ("UNETR", (1, 1, 64, 64), {**flat, "img_size": 64, "hidden_size": 48, "mlp_dim": 64, "num_heads": 4}),
        ("HighResNet", (1, 1, 32, 32), flat),
        ("MedNeXt", (1, 1, 32, 32), {**flat, "init_filters": 8}),
        ("DenseNet121", (1, 3, 64, 64), {**flat, "in_channels": 3}),
    ]  # fmt: skip
    return [
        Network("monai", f"{name}, {len(shape) - 2}-D", shape, _of("monai.networks.nets", name, **options))
        for name, shape, options in entries
    ]


def _diffusers() -> list[Network]:
    blocks = {"layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}

    def unet() -> nn.Module:
        module = _of(
            "diffusers", "UNet2DModel", sample_size=64, in_channels=3, out_channels=3, attention_head_dim=8, **blocks,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )()  # fmt: skip
        return Called(module, lambda m, x: m(x, torch.tensor([3], device=x.device)).sample)

    def conditional() -> nn.Module:
        module = _of(
            "diffusers", "UNet2DConditionModel", sample_size=32, in_channels=4, out_channels=4, cross_attention_dim=16,
            attention_head_dim=8, **blocks, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )()  # fmt: skip
        words = torch.randn(1, 5, 16)
        return Called(module, lambda m, x: m(x, torch.tensor([3], device=x.device), words.to(x)).sample)

    def autoencoder() -> nn.Module:
        module = _of(
            "diffusers", "AutoencoderKL", **blocks, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )()  # fmt: skip
        return Called(module, lambda m, x: m.decode(m.encode(x).latent_dist.mode()).sample)

    def transformer() -> nn.Module:
        module = _of(
            "diffusers", "DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=16, in_channels=4,
            num_layers=2, sample_size=16, patch_size=2, num_embeds_ada_norm=10,
        )()  # fmt: skip
        return Called(module, lambda m, x: m(x, *torch.tensor([[3], [1]], device=x.device)).sample)

    return [
        Network("diffusers", "UNet2D", (1, 3, 64, 64), unet),
        Network("diffusers", "UNet2DCondition", (1, 4, 32, 32), conditional),
        Network("diffusers", "AutoencoderKL", (1, 3, 64, 64), autoencoder),
        Network("diffusers", "DiT", (1, 4, 16, 16), transformer),
    ]


def _transformers() -> list[Network]:
    stages: dict[str, Any] = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32]}
    segformer = {**stages, "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 4]}
    vit = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 64, "intermediate_size": 64}
    entries: list[tuple[str, str, Shape, str, dict[str, Any]]] = [
        ("Segformer", "SegformerForSemanticSegmentation", (1, 3, 128, 128), "logits", segformer),
        ("GLPN", "GLPNForDepthEstimation", (1, 3, 128, 128), "predicted_depth", segformer),
        ("Dinov2", "Dinov2Model", (1, 3, 64, 64), "last_hidden_state", {**vit, "num_hidden_layers": 2, "patch_size": 8}),
        ("DPT", "DPTForDepthEstimation", (1, 3, 64, 64), "predicted_depth",
         {**vit, "num_hidden_layers": 4, "patch_size": 16, "backbone_out_indices": [0, 1, 2, 3],
          "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}),
        ("Beit", "BeitForSemanticSegmentation", (2, 3, 64, 64), "logits",
         {**vit, "num_hidden_layers": 4, "patch_size": 16, "out_indices": [0, 1, 2, 3], "use_relative_position_bias": True}),
        ("Swin", "SwinModel", (1, 3, 64, 64), "last_hidden_state",
         {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "image_size": 64, "window_size": 4}),
        ("Swin2SR", "Swin2SRForImageSuperResolution", (1, 3, 32, 32), "reconstruction",
         {"embed_dim": 16, "depths": [2], "num_heads": [2], "image_size": 32, "window_size": 4, "upscale": 2}),
        ("MobileViT", "MobileViTForSemanticSegmentation", (2, 3, 128, 128), "logits", {"image_size": 128}),
        ("FocalNet", "FocalNetModel", (1, 3, 64, 64), "last_hidden_state",
         {"embed_dim": 16, "depths": [1, 1], "image_size": 64, "hidden_sizes": [16, 32], "focal_levels": [2, 2],
          "focal_windows": [3, 3]}),
        ("PoolFormer", "PoolFormerModel", (1, 3, 128, 128), "last_hidden_state", stages),
    ]  # fmt: skip

    def build(family: str, name: str, field: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            config = _of("transformers", f"{family}Config", **options)()
            return Called(_of("transformers", name, config=config)(), lambda m, x: getattr(m(pixel_values=x), field))

        return made

    return [
        Network("transformers", name, shape, build(family, name, field, options))
        for family, name, shape, field, options in entries
    ]


def _detectors() -> list[Network]:
    tasks = "ultralytics.nn.tasks"
    return [
        Network("ultralytics", name, (2, 3, 128, 128), _of(tasks, kind, cfg=f"{name}.yaml", ch=3, nc=4, verbose=False))
        for name, kind in [
            ("yolov5n", "DetectionModel"), ("yolov8n", "DetectionModel"), ("yolov8n-seg", "SegmentationModel"),
            ("yolov9t", "DetectionModel"), ("yolov10n", "DetectionModel"), ("yolo11n", "DetectionModel"),
            ("yolo12n", "DetectionModel"),
        ]
    ]  # fmt: skip


def _losses_and_filters() -> list[Network]:
    def kornia(where: str, name: str, *others: Any, **options: Any) -> Callable[[], nn.Module]:
        def call(y: Tensor, x: Tensor) -> Any:
            own = {"x": x, "labels": (x[:, 0] > 0.5).long(), "mask": (x[:, :1] > 0.5).long()}
            given = [own[other] if isinstance(other, str) else other for other in others]
            return getattr(import_module(f"kornia.{where}"), name)(y, *given, **options)

        return lambda: AfterConvolution(call)

    calls = {
        "SSIM loss": kornia("losses", "ssim_loss", "x", 7),
        "total variation": kornia("losses", "total_variation"),
        "dice loss": kornia("losses", "dice_loss", "labels"),
        "focal loss": kornia("losses", "focal_loss", "labels", 0.5, reduction="mean"),
        "Lovasz softmax loss": kornia("losses", "lovasz_softmax_loss", "labels"),
        "PSNR loss": kornia("losses", "psnr_loss", "x", 1.0),
        "Sobel filter": kornia("filters", "sobel"),
        "Gaussian blur": kornia("filters", "gaussian_blur2d", (5, 5), (1.0, 1.0)),
        "bilateral blur": kornia("filters", "bilateral_blur", (3, 3), 0.1, (1.0, 1.0)),
        "median blur": kornia("filters", "median_blur", (3, 3)),
        "RGB to HSV": kornia("color", "rgb_to_hsv"),
        "RGB to Lab": kornia("color", "rgb_to_lab"),
        "pyramid": kornia("geometry.transform", "pyrdown"),
        "Harris response": kornia("feature", "harris_response"),
    }
    made = [Network("kornia", name, (1, 3, 96, 96), build) for name, build in calls.items()]

    def lpips() -> nn.Module:
        return AfterConvolution(_of("lpips", "LPIPS", net="alex", pretrained=False, pnet_rand=True, verbose=False)())

    return [*made, Network("lpips", "LPIPS, AlexNet", (1, 3, 96, 96), lpips)]


def _torchvision() -> list[Network]:
    def made(name: str, **options: Any) -> nn.Module:
        return import_module("torchvision.models").get_model(name, weights=None, **options)

    def detector(name: str, **options: Any) -> Callable[[], nn.Module]:
        """In training: its losses for two images, which it resizes and pads to a multiple of 32."""
        boxes = torch.tensor([[10.0, 12, 60, 90], [70, 20, 150, 120], [5.5, 60.25, 33, 100]], dtype=torch.float64)

        def losses(module: nn.Module, images: Tensor) -> Any:
            masks = torch.zeros(3, *images.shape[2:], dtype=torch.uint8, device=images.device)
            masks[:, 20:70, 15:80] = 1
            labels = torch.tensor([1, 2, 3], device=images.device)
            targets = [{"boxes": boxes.to(images) + i, "labels": labels, "masks": masks} for i in range(2)]
            return module(list(images), targets)

        return lambda: Called(made(name, weights_backbone=None, num_classes=4, **options), losses)

    sizes = {"min_size": 128, "max_size": 200}
    detectors = [
        ("fasterrcnn_mobilenet_v3_large_fpn", sizes), ("maskrcnn_resnet50_fpn", sizes), ("retinanet_resnet50_fpn", sizes),
        ("fcos_resnet50_fpn", sizes), ("ssdlite320_mobilenet_v3_large", {}),
    ]  # fmt: skip
    others: list[tuple[str, Shape, dict[str, Any]]] = [
        ("deeplabv3_mobilenet_v3_large", (2, 3, 128, 128), {"weights_backbone": None, "num_classes": 4}),
        ("r3d_18", (1, 3, 8, 64, 64), {}),
        ("swin_v2_t", (1, 3, 128, 128), {}),
        ("maxvit_t", (1, 3, 224, 224), {}),
    ]
    return [
        *(Network("torchvision", name, (2, 3, 128, 160), detector(name, **options)) for name, options in detectors),
        *(Network("torchvision", name, shape, partial(made, name, **options)) for name, shape, options in others),
    ]


def _timm() -> list[Network]:
    sizes = {
        "test_convnext": 160, "test_coatnet": 160, "test_nfnet": 160, "test_vit": 160, "hiera_tiny_224": 224, "pvt_v2_b0": 128,
        "mobilevit_xxs": 128, "efficientvit_m0": 224, "edgenext_xx_small": 128, "poolformer_s12": 128, "mvitv2_tiny": 224,
        "xcit_nano_12_p8_224": 224, "gcvit_xxtiny": 224, "davit_tiny": 128,
    }  # fmt: skip
    return [
        Network("timm", name, (2, 3, size, size), _of("timm", "create_model", model_name=name, num_classes=10))
        for name, size in sizes.items()
    ]


def _vit_pytorch() -> list[Network]:
    vit: dict[str, Any] = {
        "image_size": 64,
        "patch_size": 8,
        "num_classes": 5,
        "dim": 32,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 48,
    }
    entries: list[tuple[str, str, dict[str, Any]]] = [
        ("vit", "ViT", vit), ("simple_vit_with_fft", "SimpleViT", {**vit, "freq_patch_size": 8}), ("xcit", "XCiT", {**vit, "cls_depth": 1}),
        ("cait", "CaiT", {**vit, "cls_depth": 1}), ("pit", "PiT", {**vit, "depth": (1, 1)}), ("rvt", "RvT", vit),
        ("levit", "LeViT", {"image_size": 64, "num_classes": 5, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 2), "mlp_mult": 2}),
        ("max_vit", "MaxViT", {"num_classes": 5, "dim": 16, "dim_conv_stem": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}),
        ("regionvit", "RegionViT", {"num_classes": 5, "dim": (16, 32, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2}),
        ("nest", "NesT", {"image_size": 64, "patch_size": 4, "num_classes": 5, "dim": 32, "heads": 2, "num_hierarchies": 3,
                          "block_repeats": (1, 1, 1)}),
    ]  # fmt: skip
    return [
        Network("vit-pytorch", module, (2, 3, 64, 64), _of(f"vit_pytorch.{module}", name, **options))
        for module, name, options in entries
    ]


def _restoration() -> list[Network]:
    tokens = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "upscale": 2, "img_size": 64, "window_size": 8}
    entries: list[tuple[str, str, dict[str, Any]]] = [
        ("SwinIR", "SwinIR", {**tokens, "mlp_ratio": 2}),
        ("HAT", "HAT", {**tokens, "mlp_ratio": 2, "compress_ratio": 3, "squeeze_factor": 6}),
        ("ATD", "ATD", {**tokens, "mlp_ratio": 2}),
        ("DRCT", "DRCT", {**tokens, "depths": (2,), "num_heads": (2,), "gc": 8, "upsampler": "pixelshuffle"}),
        ("ESRGAN", "ESRGAN", {"num_filters": 16, "num_blocks": 1, "scale": 2}),
        ("RCAN", "RCAN", {"scale": 2, "n_feats": 16, "n_resgroups": 2, "n_resblocks": 2}),
        ("NAFNet", "NAFNet", {"width": 16}),
        ("FFTformer", "FFTformer", {"dim": 24, "num_blocks": [1, 1, 1]}),
        ("OmniSR", "OmniSR", {"num_feat": 16, "window_size": 8}),
        ("RetinexFormer", "RetinexFormer", {"num_blocks": [1, 1, 1]}),
    ]
    return [
        Network("spandrel", name, (1, 3, 64, 64), _of(f"spandrel.architectures.{module}", name, **options))
        for module, name, options in entries
    ]


def _operators() -> list[Network]:
    small = {"in_channels": 3, "out_channels": 2, "hidden_channels": 8}
    uno = {"uno_out_channels": [8] * 3, "uno_n_modes": [[6, 6]] * 3, "uno_scalings": [[1, 1], [0.5, 0.5], [2, 2]]}
    entries: list[tuple[str, str, Shape, dict[str, Any]]] = [
        ("FNO, 2-D", "FNO", (2, 3, 64, 64), {**small, "n_modes": (8, 6), "n_layers": 2}),
        ("FNO, 3-D", "FNO", (1, 3, 8, 16, 16), {**small, "n_modes": (4, 4, 4), "n_layers": 2}),
        ("UNO", "UNO", (2, 3, 64, 64), {**small, **uno, "n_layers": 3, "channel_mlp_skip": "linear"}),
    ]
    return [
        Network("neuraloperator", name, shape, _of("neuralop.models", kind, **options))
        for name, kind, shape, options in entries
    ]


# One of each module of timm 1.0.31 that has one of less than 90 million parameters: the smallest.
_FAMILIES_OF_TIMM = """
    beit_base_patch16_224 halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext cpubone_nano
    crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small
    efficientformer_l1 efficientformerv2_s0 mnasnet_small efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224
    fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hieradet_small
    hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s lowformer_b0
    test_mambaout test_coatnet poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mvitv2_tiny
    naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny nextvit_small test_nfnet pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m
    rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18
    sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224
    tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small visformer_tiny test_vit vit_tiny_r_s16_p8_224 test_vit_relpos
    samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
"""


def timm_network(name: str) -> Network:
    """A network of timm, on images of 128 x 128 where it takes such, else of its own size."""
    cfg = import_module("timm").get_pretrained_cfg(name)
    blocks = {"halonet_h1": 256}  # whole blocks at each scale
    size = cfg.input_size[-1]
    size = blocks.get(name, size if cfg.fixed_input_size else min(size, 128))
    tolerance = 1e-4 if name == "efficientvit_b0" else 1e-6  # its attention is float32, whatever comes in
    build = _of("timm", "create_model", model_name=name, num_classes=10)
    return Network("timm", name, (2, 3, size, size), build, tolerance)


def timm_families() -> list[Network]:
    return [timm_network(name) for name in _FAMILIES_OF_TIMM.split()]


def networks() -> list[Network]:
    """All of them, whether their libraries are installed or not."""
    return [
        *_segmentation_models(), *_monai(), *_diffusers(), *_transformers(), *_detectors(), *_losses_and_filters(),
        *_torchvision(), *_timm(), *_vit_pytorch(), *_restoration(), *_operators(),
    ]  # fmt: skip
