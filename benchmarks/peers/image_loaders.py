"""Other loaders of images, each in a process of its own: PyTorch with torchvision, and grain.

    python -m benchmarks.peers.image_loaders --pipeline=grain --images_dir=DIRECTORY_WITH_JPEGS

Reads files NUMBER-LABEL.jpg in shuffled order, and makes batches of random resized crops, uint8.
On one core a process for loading would only add copies, so none is started. Imports no TensorFlow.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIZE, BATCH = 224, 32
_FIRST_BATCHES, _BATCHES = 20, 10  # The first are not measured: they were read ahead.


def answer_turns(take: Callable[[], Any]) -> None:
    """For each line on standard input, prints the images a second of CPU time of one turn."""
    for _ in sys.stdin:
        for _ in range(_FIRST_BATCHES):
            take()
        began = time.process_time()
        for _ in range(_BATCHES):
            take()
        print(_BATCHES * BATCH / (time.process_time() - began), flush=True)


def _paths(directory: str) -> list[str]:
    return [str(path) for path in sorted(Path(directory).glob("*.jpg"))]


def _label(path: str) -> int:
    return int(Path(path).stem.partition("-")[2])


def torchvision_pil(directory: str) -> Iterator[Any]:
    """DataLoader, with PIL as the decoder: the default of ImageFolder."""
    import PIL.Image

    return _torch(directory, lambda path: PIL.Image.open(path).convert("RGB"))


def torchvision_io(directory: str) -> Iterator[Any]:
    """DataLoader, with torchvision's own decoder."""
    from torchvision import io

    return _torch(directory, lambda path: io.decode_jpeg(io.read_file(path), io.ImageReadMode.RGB))


def _torch(directory: str, load: Callable[[str], Any]) -> Iterator[Any]:
    import torch
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    paths = _paths(directory)
    transform = v2.Compose(
        [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    )

    class Files(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return transform(load(paths[index])), _label(paths[index])

    loader = torch.utils.data.DataLoader(Files(), BATCH, shuffle=True, drop_last=True)
    while True:
        yield from loader


def of_grain(directory: str) -> Iterator[Any]:
    """MapDataset of grain, with PIL as the decoder."""
    import grain
    import numpy as np
    import PIL.Image

    class Load(grain.transforms.RandomMap):
        def random_map(self, path: str, rng: np.random.Generator) -> tuple[Any, int]:
            image = PIL.Image.open(path)
            box = _box(rng, image.height, image.width)
            pixels = image.convert("RGB").resize((SIZE, SIZE), PIL.Image.Resampling.BILINEAR, box)
            array = np.asarray(pixels)
            return (array[:, ::-1] if rng.random() < 0.5 else array), _label(path)

    source = grain.MapDataset.source(_paths(directory)).seed(0).shuffle().repeat()
    batches = source.random_map(Load()).batch(BATCH, drop_remainder=True)
    # By default 500 batches are read ahead, more than a turn takes.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def _box(rng: Any, height: int, width: int) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a random resized crop."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1)
        aspect = (4 / 3) ** rng.uniform(-1, 1)
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if w <= width and h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return 0, 0, width, height


PEERS: dict[str, Callable[[str], Iterator[Any]]] = {
    "PyTorch, torchvision, PIL": torchvision_pil,
    "PyTorch, torchvision's decoder": torchvision_io,
    "grain, PIL": of_grain,
}


def main() -> None:
    """Runs one pipeline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", required=True, choices=PEERS)
    parser.add_argument("--images_dir", required=True)
    options = parser.parse_args()
    batches = PEERS[options.pipeline](options.images_dir)
    answer_turns(lambda: next(batches))


if __name__ == "__main__":
    main()
