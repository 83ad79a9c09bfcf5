"""What a new sampling parameter costs: one is added to a copy of the product, in a few files. All
dialects must have it then, and it must reach the kernels of every device and act there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Kernels are compiled for the copy.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKAGES = ("process", "proto", "router", "shard")
MOST_FILES = 6
PROTO = "proto/text_generation_proto/v1/generate.proto"
SHARD = "shard/text_generation_shard"
# File → a line of it, and what is put behind this line. The parameter is the logarithm of min_p, so
# that there is something to compare with.
ADDED = {
    "process/text_generation_process/sampling.py": {
        "_SHARE = ": "_GAP = Range(lambda value: 0.0 < value < 100.0, '> 0.0 and < 100.0')",
        "    min_p: float = ": """
    largest_gap: float = _number(
        0.0, _GAP, {"ge": 0, "lt": 100}, about="The largest distance from the best.", example=50.0
    )""",
    },
    PROTO: {"  float min_p = ": "  float largest_gap = 14;"},
    f"{SHARD}/sampling.py": {
        '    ranked = ranked.masked_fill(ranked < drawn["min_p"]': """
    gap = drawn["largest_gap"]
    ranked = ranked.masked_fill((gap > 0) & (ranked < -gap), nothing)"""
    },
    f"{SHARD}/device/cpu/kernels/choice.py": {
        "        _cut(scores, weights, sums, scores, params.min_p": """
    if params.largest_gap > 0:
        _cut(scores, weights, sums, scores, -params.largest_gap, len(scores))"""
    },
    f"{SHARD}/device/cuda/kernels/choice.py": {
        "_MIN_P: ": '_GAP: tl.constexpr = tl.constexpr(DRAWING.index("largest_gap"))',
        "    log_min_p = ": """
    gap = tl.load(values_ptr + _GAP)
    log_min_p = tl.maximum(log_min_p, tl.where(gap > 0.0, -gap, float("-inf")))""",
    },
}


def insert(path: Path, after: dict[str, str]) -> None:
    """Puts each text behind the one line that begins so."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for beginning, text in after.items():
        [place] = [at for at, line in enumerate(lines) if line.startswith(beginning)]
        lines[place + 1 : place + 1] = text.removeprefix("\n").splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# What is run in the copy, with a folder for a tokenizer.
CHECK = """
import asyncio, math, sys
from dataclasses import replace
from pathlib import Path

import pytest, torch
from pydantic import ValidationError as TypesError
from router.tests.serving import write_tokenizer
from router.tests.test_validation import LIMITS, NO_GRAMMARS
from shard.tests.device.cuda.kernels import test_choice as cuda
from shard.tests.test_sampling import choose
from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from text_generation_router import SamplingParams
from text_generation_router.api.openai.chat import ChatRequest
from text_generation_router.api.openai.completions import CompletionRequest
from text_generation_router.api.tgi.generate import GenerateRequest
from text_generation_router.errors import ValidationError
from text_generation_router.metrics import Metrics
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.validation import Validation
from text_generation_shard import sampling
from text_generation_shard.device.cpu import runner

folder, gap = Path(sys.argv[1]), {"largest_gap": 1.5}
write_tokenizer(folder)
validation = Validation(LIMITS, Tokenizer.load(folder), Metrics(9, 12), NO_GRAMMARS)

# Every dialect has it, described and with its limits.
chat = {"messages": [{"role": "user", "content": "a"}]}
for asked in (
    GenerateRequest(inputs="a", parameters=gap).to_parameters(),
    CompletionRequest(prompt="a", **gap).parameters(),
    ChatRequest(**chat, **gap).to_conversation().parameters,
    SamplingParams(**gap).to_parameters(),
):
    asked = replace(asked, inputs="a", max_new_tokens=1)
    request = asyncio.run(validation.validate(asked))
    assert request.sampling.largest_gap == 1.5 and request.sampling.is_sampling
for body in (ChatRequest, CompletionRequest):
    field = body.model_json_schema()["properties"]["largest_gap"]
    assert field["description"] == "The largest distance from the best."
with pytest.raises(TypesError, match="largest_gap"):
    CompletionRequest(prompt="a", largest_gap=100)
with pytest.raises(ValidationError, match="`largest_gap` must be > 0.0 and < 100.0"):
    wrong = GenerateRequest(inputs="a", parameters={"largest_gap": 0.0}).to_parameters()
    asyncio.run(validation.validate(wrong))

# It goes to the shards …
sent = pb.NextTokenChooserParameters(**Sampling(**gap).to_wire()).SerializeToString()
received = Sampling.from_wire(pb.NextTokenChooserParameters.FromString(sent))
assert received == Sampling(**gap)

# … and acts on every device, as the min_p that it is the logarithm of.
scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
same, plain = Sampling(min_p=math.exp(-1.5)), Sampling(do_sample=True)
for sample in (sampling.sample, runner.sample, cuda.own):
    kept, wanted, all_kept = (
        torch.as_tensor(choose(scores, [params] * 4, sample=sample).scores).isfinite()
        for params in (received, same, plain)
    )
    assert torch.equal(kept, wanted) and all_kept.all() and not kept.all(), sample
print("it acts")
"""


def test_a_new_sampling_parameter_touches_few_files_and_acts(tmp_path: Path) -> None:
    assert len(ADDED) <= MOST_FILES
    copy, tokenizer = tmp_path / "copy", tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in PACKAGES:
        package = f"{name}/text_generation_{name}"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    for name, after in ADDED.items():
        insert(copy / name, after)
    # As `make proto`.
    proto = copy / "proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto}", f"--python_out={proto}"]
    subprocess.run([*command, f"--grpc_python_out={proto}", copy / PROTO], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*(str(copy / name) for name in PACKAGES), str(ROOT)]),
        "NUMBA_CACHE_DIR": str(copy / "kernels"),
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK, tokenizer],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "it acts\n", done.stderr
