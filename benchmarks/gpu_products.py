"""Products of our kernels (int8, int4, and floats with one tile) and of torch in fp8, compared with
cuBLAS: error against float64, share of the GPU's limits."""

from collections.abc import Callable
from functools import partial

from gpu_limits import weights_of
from gpu_timing import Bench, Figures, Model, error_of
from text_generation_shard.device.base import Matrix
from text_generation_shard.device.cuda import matrices
from text_generation_shard.device.reference.matrices import (
    GROUP,
    FloatMatrix,
    quantize_groups,
    quantize_rows,
    quantize_rows_float8,
)
from torch import Tensor

# The measured products of each layer.
_WEIGHTS = ("qkv", "gate_up", "down")
# Outputs that are checked.
_CHECKED = 256
# More rows than this are limited by the rate of products, not by reading the weight.
_FEW_ROWS = 128

FORMS: dict[str, Callable[[Tensor], Matrix]] = {
    "cuBLAS": FloatMatrix,
    "one tile": matrices.OneTileMatrix,
    "int8": lambda weight: matrices.Int8Matrix(weight, weight.dtype, False),
    "int4": lambda weight: matrices.Int4Matrix(weight, weight.dtype, False),
    "fp8": lambda weight: matrices.Float8Matrix(weight, weight.dtype, False),
}
# Forms that some GPUs do not support.
_FOREIGN = ("cuBLAS", "fp8")


def products(bench: Bench) -> None:
    """Every form, for decode and for a prompt."""
    for model in bench.models:
        for name in _WEIGHTS:
            for form in FORMS:
                for rows in bench.sizes((1, 16, 32, 256, 4096), (2,)):
                    work = partial(_product, bench, model, name, form, rows)
                    label = f"{model.name} {name}, {form}: {rows} rows"
                    bench.measure(label, work, is_own=form not in _FOREIGN)


def _product(bench: Bench, model: Model, name: str, form: str, rows: int) -> Figures:
    outputs, inputs = weights_of(model)[name]
    weight, hidden = bench.random(outputs, inputs, scale=0.02), bench.random(rows, inputs)
    made = [FORMS[form](weight)]
    while len(made) < bench.copies(made[0].nbytes):
        made.append(FORMS[form](weight.clone()))
    kept = weight[:_CHECKED]
    wanted = _spelled(hidden, form, is_weight=False) @ _spelled(kept, form, is_weight=True).t()
    error = error_of(made[0](hidden)[:, :_CHECKED], wanted)
    us = bench.device_us(lambda copy: made[copy](hidden), len(made), 0.02)
    if rows > _FEW_ROWS:
        return bench.computed(us, 2.0 * rows * outputs * inputs) | error
    return bench.moved(us, made[0].nbytes + 2 * rows * (inputs + outputs)) | error


def _spelled(values: Tensor, form: str, is_weight: bool) -> Tensor:
    """The operand of a product, in float64."""
    if form == "fp8":
        numbers, scale = quantize_rows_float8(values)
        return numbers.double() * scale.double()[:, None]
    if is_weight and form == "int8":
        numbers, scale = quantize_rows(values, values.dtype)
        return numbers.double() * scale.double()[:, None]
    if is_weight and form == "int4":
        numbers, scale, zero = quantize_groups(values, values.dtype)
        groups = numbers.double().view(len(values), -1, GROUP) - 8
        return (groups * scale.double()[..., None] + zero.double()[..., None]).flatten(1)
    return values.double()
