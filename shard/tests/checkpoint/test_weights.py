"""Loading of weights from a checkpoint, by plain copies and through buffers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.partition import Share, whole
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device import open_device
from text_generation_shard.device.base import DeviceOptions, Matrix, WeightCopies
from text_generation_shard.device.cuda.device import dtype_of
from text_generation_shard.device.cuda.staging import StagedCopies
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import ModelError
from text_generation_shard.models.registry import load_model
from text_generation_shard.parallel import World
from torch import Tensor

from shard.tests.driver import reference_device

# q, k and v; a matrix of two stacked projections; one split by its inputs; vectors.
SHAPES = {
    "q": (24, 20),
    "k": (8, 20),
    "v": (8, 20),
    "gate_up": (64, 20),
    "down": (20, 32),
    "norm": (20,),
    "q.bias": (24,),
    "k.bias": (8,),
    "v.bias": (8,),
    "down.bias": (20,),
}
HEADS = {"q": 24, "k": 8, "v": 8}


class LateBuffer:
    """A buffer that copies only when it is waited for."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.num_sent = 0
        self._sent: list[tuple[Tensor, Tensor]] = []

    def wait(self) -> None:
        time.sleep(0.0005)
        for staged, target in self._sent:
            target.copy_(staged)
        self._sent.clear()
        self.memory.fill_(0xA5)

    def send(self, staged: Tensor, target: Tensor) -> None:
        assert (staged.shape, staged.dtype) == (target.shape, target.dtype)
        assert staged.untyped_storage().data_ptr() == self.memory.data_ptr()
        assert not self._sent, "what was sent first is still in the memory"
        self._sent.append((staged, target))
        self.num_sent += 1


class StagingDevice(Device):
    """A device that loads like a GPU, into host memory."""

    make_buffer: Callable[[int], LateBuffer] = LateBuffer
    buffer_bytes = 1000
    buffers: Sequence[LateBuffer] = ()

    def weight_copies(self) -> AbstractContextManager[WeightCopies]:
        self.buffers = [type(self).make_buffer(self.buffer_bytes) for _ in range(4)]
        return StagedCopies(self.dtype, self.buffers, num_threads=2)


@pytest.fixture(autouse=True)
def none_remains() -> Iterator[None]:
    """No copying thread is left, and torch's number of threads is restored for later threads."""
    count = num_torch_threads()
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    assert num_torch_threads() == count


def num_torch_threads() -> int:
    """In a new thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.get_num_threads).result()


def write(folder: Path, dtype: torch.dtype, num_files: int = 3) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }
    for index in range(num_files):
        names = sorted(tensors)[index::num_files]
        save_file({name: tensors[name] for name in names}, folder / f"part-{index}.safetensors")


def loaded(device: Device, rank: int, size: int, folder: Path) -> dict[str, Tensor]:
    """All weights of a model, as the layers of a rank load them. The inputs of `down` are padded if
    they can not be divided."""
    parameters = Parameters(device)
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], Matrix]:
        def receive(weight: Tensor) -> Matrix:
            found[name] = weight.to(device.dtype)
            return device.matrix(weight, None)

        return receive

    def own(total: int) -> Share:
        count = -(-total // size)
        return Share(total, rank * count, count)

    heads = {name: [own(total)] for name, total in HEADS.items()}
    parameters.add_matrix(heads, whole(20), keep("qkv"))
    parameters.add_matrix({"gate_up": [own(32), own(32)]}, whole(20), keep("gate_up"))
    parameters.add_matrix({"down": [whole(20)]}, own(32), keep("down"))
    vectors = {
        "norm": parameters.add_vector({"norm": [whole(20)]}),
        "qkv.bias": parameters.add_vector({f"{name}.bias": heads[name] for name in HEADS}),
        "down.bias": parameters.add_vector({"down.bias": [whole(20)]}),
    }
    parameters.load(folder)
    found |= vectors
    assert parameters.nbytes == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.mark.parametrize("buffer_bytes", [16, 64, 4096, 2**20])
@pytest.mark.parametrize("rank", [(0, 1), (1, 2), (4, 5), (3, 4)])
@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_through_buffers_every_bit_is_as_by_plain_copies(
    stored: torch.dtype,
    kept: torch.dtype,
    rank: tuple[int, int],
    buffer_bytes: int,
    tmp_path: Path,
) -> None:
    """Also rows larger than a buffer; no buffer is filled before its last copy is complete."""
    write(tmp_path, stored)
    plain = loaded(reference_device(dtype=kept), *rank, tmp_path)
    device = reference_device(StagingDevice, kept)
    assert isinstance(device, StagingDevice)
    device.buffer_bytes = buffer_bytes
    staged = loaded(device, *rank, tmp_path)
    assert list(plain) == list(staged)
    for name, tensor in plain.items():
        assert tensor.dtype == staged[name].dtype == kept
        assert torch.equal(tensor, staged[name]), name
    # The padding of the last ranks' parts is not copied.
    size = sum(int(tensor.count_nonzero()) * kept.itemsize for tensor in staged.values())
    assert sum(buffer.num_sent for buffer in device.buffers) >= size / buffer_bytes


def test_a_matrix_is_never_held_in_the_type_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, torch.float32)
    seen = []
    for kind in (Device, StagingDevice):
        parameters = Parameters(reference_device(kind, torch.bfloat16))

        def receive(weight: Tensor, parameters: Parameters = parameters) -> Matrix:
            seen.append(weight.dtype)
            return parameters.device.matrix(weight, None)

        parameters.add_matrix({"down": [whole(20)]}, whole(32), receive)
        for name in SHAPES:
            parameters.ignore(name)
        parameters.load(tmp_path)
    assert seen == [torch.float32, torch.bfloat16]


class FullBuffer(LateBuffer):
    def send(self, staged: Tensor, target: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


class FullDevice(StagingDevice):
    make_buffer = FullBuffer


def test_no_room_in_a_thread_is_a_sentence(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama-bias")
    config = LlamaConfig.from_hf(path)
    with pytest.raises(ModelError, match="the weights do not fit into the memory of the GPU"):
        load_model(path, config, reference_device(FullDevice), World(), None)


def test_the_first_copys_error_is_raised_however_late_it_comes() -> None:
    class Slow(LateBuffer):
        def send(self, staged: Tensor, target: Tensor) -> None:
            number = int(staged[0])
            time.sleep(0.05 if number == 1 else 0)
            raise RuntimeError(f"copy {number}")

    target = torch.empty(1)
    with (
        pytest.raises(RuntimeError, match="copy 1"),
        StagedCopies(None, [Slow(64), Slow(64)], num_threads=2) as copies,
    ):
        for number in (1, 2, 3):
            copies.copy(target, torch.tensor([float(number)]))


@pytest.mark.parametrize("kind", [Device, StagingDevice])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "lack q; config.json and weights are not of the same model"),
        ({"odd": (3,)}, "hold unexpected odd; config.json"),
        ({"v": (8, 21)}, r"v in part-0.safetensors has the shape \[8, 21\], config.json asks for"),
        (None, "part-1.safetensors is not a readable safetensors file"),
    ],
)
def test_faults_of_a_checkpoint_are_said_alike(
    kind: type[Device],
    change: dict[str, tuple[int, ...] | None] | None,
    message: str,
    tmp_path: Path,
) -> None:
    shapes = SHAPES | (change or {})
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if shape is not None}
    save_file(tensors, tmp_path / "part-0.safetensors")
    if change is None:
        (tmp_path / "part-1.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=message):
        loaded(reference_device(kind), 0, 1, tmp_path)


@pytest.mark.parametrize(
    ("asked", "checkpoint_dtype", "capability", "expected"),
    [
        ("float32", "bfloat16", 90, torch.float32),
        (None, "bfloat16", 90, torch.bfloat16),
        (None, "float16", 75, torch.float16),
        (None, "float32", 80, torch.bfloat16),
        (None, "float32", 75, torch.float16),
        (None, "float64", 90, torch.bfloat16),
    ],
)
def test_the_type_a_gpu_computes_in(
    asked: str | None,
    checkpoint_dtype: str,
    capability: int,
    expected: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = DeviceOptions(asked, checkpoint_dtype)
    with caplog.at_level(logging.INFO):
        assert dtype_of(options, capability) is expected
    was_chosen = asked is None and checkpoint_dtype not in ("float16", "bfloat16")
    assert bool(caplog.text) == was_chosen
    if was_chosen:
        assert f"the checkpoint is {checkpoint_dtype}" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_holds_no_more_than_the_weights(dtype: str, tmp_path: Path) -> None:
    """A matrix of several buffers. Pinned memory is released."""
    big = torch.randn(12_000, 4096, generator=torch.Generator().manual_seed(1))
    save_file({"big": big}, tmp_path / "model.safetensors")
    device = open_device("cuda", DeviceOptions(dtype, "float32"))
    parameters, found = Parameters(device), []

    def receive(weight: Tensor) -> Matrix:
        found.append(weight)
        return device.matrix(weight, None)

    parameters.add_matrix({"big": [whole(12_000)]}, whole(4096), receive)
    torch.cuda.reset_peak_memory_stats()
    before, pinned = torch.cuda.memory_allocated(), pinned_bytes()
    parameters.load(tmp_path)
    # The allocator allocates in units of 2 MiB.
    assert torch.cuda.max_memory_allocated() - before <= found[0].nbytes + 2**21
    assert torch.equal(found[0].cpu(), big.to(device.dtype))
    assert pinned_bytes() <= pinned


def pinned_bytes() -> int:
    """Pinned host memory allocated by torch."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
