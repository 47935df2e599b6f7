"""Normalisation that keeps records apart, in place of BatchNorm."""

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def replace_batchnorm(module: nn.Module) -> nn.Module:
    """Return a copy with GroupNorm for every BatchNorm (1d, 2d, 3d, SyncBatchNorm).

    Weight, bias and eps are taken over, running statistics are dropped. The number of groups is
    the largest divisor of the channels that is at most 32 and leaves 4 channels a group, else 1.
    An InstanceNorm that tracks statistics stays one that does not.

    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48)))[1]
    GroupNorm(12, 48, ...)
    """
    module = copy.deepcopy(module)
    replaced: dict[nn.Module, nn.Module] = {}
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            replaced[layer] = _group_norm(layer)
        elif isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            replaced[layer] = _instance_norm(layer)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced:
                setattr(parent, name, replaced[child])
    return replaced.get(module, module)


def _group_norm(old: _BatchNorm) -> nn.Module:
    channels = old.num_features
    fitting = [g for g in range(1, 33) if channels % g == 0 and channels // g >= 4]
    new = nn.GroupNorm(max(fitting, default=1), channels, eps=old.eps, affine=old.affine)
    return _taken_over(old, new)


def _instance_norm(old: _InstanceNorm) -> nn.Module:
    new = type(old)(old.num_features, eps=old.eps, affine=old.affine, track_running_stats=False)
    return _taken_over(old, new)


def _taken_over(old: nn.Module, new: nn.Module) -> nn.Module:
    # The very parameters: their type, device and requires_grad come along.
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    return new.train(old.training)
