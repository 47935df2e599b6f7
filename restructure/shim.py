"""PyPI's torchvision is built for the CUDA build of torch: its own operators do not load here.

Declaring the two that its Python registers fakes for lets the rest import; no model here uses them.
"""
import torch

_LIB = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    _LIB.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
