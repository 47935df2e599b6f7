"""The image data sets: digits, MNIST, Fashion-MNIST, CIFAR-10, decoded and normalised.

The normalising constants are published with the data sets; nothing is estimated from records.
"""

import gzip
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from fedpact.data.dataset import Dataset
from fedpact.data.files import SOURCES, Arrays, Source, load_cached, read_verified


@dataclass(frozen=True)
class _Images:
    title: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of each channel, over pixels scaled to 0..1
    std: tuple[float, ...]


_DIGITS = tuple("0123456789")
_IMAGES = {
    "mnist": _Images("MNIST, handwritten digits 28x28", _DIGITS, (0.1307,), (0.3081,)),
    "fashion_mnist": _Images(
        "Fashion-MNIST, clothing 28x28",
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        (0.2860,),
        (0.3530,),
    ),
    "cifar10": _Images(
        "CIFAR-10, natural images 3x32x32",
        (
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
}


def load_images(name: str) -> Dataset:
    """Return "mnist" or "fashion_mnist" [n, 1, 28, 28], or "cifar10" [n, 3, 32, 32].

    Each channel is (pixel / 255 - mean) / std. Raises DataError where a file is missing or damaged.
    """
    about = _IMAGES[name]
    decode = _decode_cifar if name == "cifar10" else _decode_idx
    arrays = load_cached(SOURCES[name], decode)
    return Dataset(
        name=name,
        x=_normalised(arrays["x"], about),
        y=torch.from_numpy(arrays["y"].astype(np.int64)),
        classes=about.classes,
        x_test=_normalised(arrays["x_test"], about),
        y_test=torch.from_numpy(arrays["y_test"].astype(np.int64)),
        description=f"{about.title}; pixels / 255, then mean {about.mean}, standard deviation "
        f"{about.std} (published)",
    )


def load_digits() -> Dataset:
    """Return 1,797 handwritten digits [n, 1, 8, 8], pixels / 16, which come with the package.

    The public test set is every fifth record of each class in the order of the file: 20 %.
    """
    with files("fedpact.data").joinpath("digits.npz").open("rb") as file, np.load(file) as held:
        pixels, labels = held["pixels"], held["labels"]
    x = torch.from_numpy(pixels / 16).float()[:, None]
    y = torch.from_numpy(labels).long()
    rank = (torch.cumsum(torch.nn.functional.one_hot(y), 0) - 1).gather(1, y[:, None])[:, 0]
    test = rank % 5 == 4
    return Dataset(
        name="digits",
        x=x[~test],
        y=y[~test],
        classes=_DIGITS,
        x_test=x[test],
        y_test=y[test],
        description="UCI's digits 8x8; pixels / 16; every fifth record of a class tests",
    )


def _normalised(pixels: np.ndarray, about: _Images) -> Tensor:
    mean, std = (torch.tensor(c).view(-1, 1, 1) for c in (about.mean, about.std))
    return torch.from_numpy(pixels.astype(np.float32)).div_(255).sub_(mean).div_(std)


def _decode_idx(source: Source) -> Arrays:
    # An IDX file: two zero bytes, the type (8 = uint8), the number of dimensions, each of them as a
    # big-endian uint32, then the values.
    arrays = []
    for file in source.files:
        content = gzip.decompress(read_verified(source, file))
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
        arrays.append(np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape))
    x, y, x_test, y_test = arrays
    return {"x": x[:, None], "y": y, "x_test": x_test[:, None], "y_test": y_test}


def _decode_cifar(source: Source) -> Arrays:
    # liblzma and MD5 release the interpreter's lock, so the batches decode in parallel.
    with ThreadPoolExecutor() as pool:
        batches = list(
            pool.map(lambda file: cifar_batch(read_verified(source, file)), source.files)
        )
    *train, (x_test, y_test) = batches
    x, y = (np.concatenate(part) for part in zip(*train, strict=True))
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


def cifar_batch(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 3, 32, 32] and labels [n], uint8, of one CIFAR-10 batch in binary form.

    A row is the label, then 1,024 red, 1,024 green and 1,024 blue values, line by line.
    """
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
