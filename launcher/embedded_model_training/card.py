"""The model card, written from the figures of a run so that it can't disagree with them."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from embedded_model_training.corpus import HELD_OUT_MODULES
from embedded_model_training.dialogue import QUESTIONS

CARD = Template(
    """\
---
language: en
library_name: transformers
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
pipeline_tag: text-generation
tags: [python, llama, tiny]
---

# The embedded model

The checkpoint that is served when no `--model-id` is given: a Llama of $millions million
parameters that knows the Python standard library, so that a server can be tried, tested and
measured without a download. It answers questions about the library's names, and continues Python
source in its form more than in its sense. It knows nothing else, and was taught to say so.

    What does textwrap.dedent do?
    `dedent(text)`: Remove any common leading whitespace from every line in `text`.

## Shape

`LlamaForCausalLM`: hidden size 256, 6 layers, 4 attention heads over 2 key-value heads, MLP of
688, 2,048 positions, tied embeddings; byte-level BPE of 4,096 tokens; bfloat16 safetensors. The
checkpoint's files come to $megabytes MB.

A chat is written in the ChatML form (`chat_template` of `tokenizer_config.json`), and an answer
ends with `<|im_end|>`. A question is answered without the template too.

## What it was trained on

The standard library of Python $python, and for the last of these points a few lines written by
hand:

* $entries docstrings of public modules, classes, functions and methods as question and answer
  pairs: a question in one of $wordings wordings, in the chat form (60 %) or bare (40 %); an
  answer of the signature and the docstring's first paragraph, cut at about 230 characters;
* the source of the modules, a fifth of the tokens;
* a few dozen greetings and questions about anything else, which are answered by saying what the
  model is for (about 1 %).

Left out: tests, `idlelib`, `lib2to3`, `tkinter`, `turtledemo`, bundled third-party code, modules
that Python 3.13 removed, and the modules held out for the evaluation
($held_out).

$steps steps of 4,096 tokens (each docstring about 65 times), seed $seed, AdamW at 3e-3 with a
cosine: $minutes minutes on $device, with torch $torch. The training loss, over answers
and source together, ended at $training_loss.

## What it scores

| | |
|---|---|
| Right signature, of $questions fixed questions in the chat form | **$right_signature_chat** |
| The same questions without the template | **$right_signature_raw** |
| The same names in a wording that training didn't have | $right_signature_unseen_wording |
| Held-out loss: source of the held-out modules, nats per token | **$held_out_source_loss** |
| The same in bits per byte | $held_out_source_bits_per_byte |
| Loss of the answers in a wording that training didn't have | $unseen_wording_answer_loss |

The questions ask for names that the model was trained on, drawn at random: the score says how
much of the library it remembers. An answer is right if it starts with exactly the expected
signature, decoded greedily.

What it can't do: about a name that doesn't exist, a name without its module (`dedent`), or a
module that was left out, it makes something up; and source that it continues is shaped like
Python, but soon repeats itself or means nothing.

## Train it again

From the root of the repository:

    PYTHONPATH=launcher python -m embedded_model_training.train      # about an hour on two cores
    PYTHONPATH=launcher python -m embedded_model_training.evaluate   # writes this card's figures

A GPU is used where there is one. `--resume` goes on after an interruption. Another number of
threads, processor or release of torch rounds differently, so that the weights won't be the same
as these. (These are of a run that was interrupted and resumed once, at step 1,250.)

## Licence

Trained on, and able to repeat parts of, the Python standard library, which is copyright the
Python Software Foundation and under the PSF License Version 2
(<https://docs.python.org/3/license.html>). The checkpoint is distributed under the same licence.
"""
)


def write_card(path: Path, result: dict[str, Any]) -> None:
    """Write the card with the figures of a complete result."""
    figures: dict[str, Any] = {**result["training"], **result["evaluation"]}
    figures["entries"] = f"{figures['entries']:,}"
    figures["steps"] = f"{figures['steps']:,}"
    figures["millions"] = f"{figures['parameters'] / 1e6:.1f}"
    figures["megabytes"] = f"{figures['bytes'] / 1e6:.1f}"
    figures["minutes"] = f"{figures['minutes']:.0f}"
    figures["wordings"] = len(set(QUESTIONS))
    figures["held_out"] = ", ".join(f"`{name}`" for name in HELD_OUT_MODULES)
    path.write_text(CARD.substitute(figures), "utf-8")
