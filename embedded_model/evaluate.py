"""The scores of the embedded model: held-out loss, and the share of 200 fixed questions answered
with the right signature, decoded greedily."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from embedded_model.corpus import Entry, build_entries, held_out_files
from embedded_model.dialogue import (
    END_OF_TEXT,
    QUESTIONS,
    TURN_END,
    Exchange,
    chat_exchange,
    raw_exchange,
)
from embedded_model.save import load_tokenizer, token_id
from embedded_model.train import DEFAULT_OUTPUT, DEFAULT_RESULT

QUESTION_COUNT = 200
QUESTION_SEED = 200
QUESTIONS_FILE = Path(__file__).with_name("questions.json")
ANSWER_LIMIT = 120
BATCH_SIZE = 40
WINDOW = 1024

UNSEEN_QUESTIONS = ("Can you describe what {name} is good for?", "I don't understand {name}, help!")
"""Wordings that the training does not have."""


@dataclass(frozen=True, slots=True)
class Question:
    """A fixed question, and the signature that its answer has to start with."""

    name: str
    question: str
    signature: str


def draw_questions(entries: list[Entry]) -> list[Question]:
    """The fixed questions: random names that can be called, asked in each wording in turn."""
    callables = [entry for entry in entries if "(" in entry.signature]
    chosen = Random(QUESTION_SEED).sample(callables, QUESTION_COUNT)
    wordings = list(dict.fromkeys(QUESTIONS))
    return [
        Question(
            entry.name,
            wordings[index % len(wordings)].format(name=entry.name),
            entry.signature,
        )
        for index, entry in enumerate(chosen)
    ]


def read_questions() -> list[Question]:
    """The questions as they are committed."""
    return [Question(**question) for question in json.loads(QUESTIONS_FILE.read_text("utf-8"))]


def write_questions(questions: list[Question]) -> None:
    """Write the questions, one per line."""
    lines = [json.dumps(asdict(question), ensure_ascii=False) for question in questions]
    QUESTIONS_FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def generate(model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """The model's greedy answer to each prompt."""
    padding = token_id(tokenizer, END_OF_TEXT)
    ends = [token_id(tokenizer, TURN_END), padding]
    answers: list[str] = []
    untyped: Any = model
    for start in range(0, len(prompts), BATCH_SIZE):
        rows = [tokenizer.encode(prompt).ids for prompt in prompts[start : start + BATCH_SIZE]]
        width = max(map(len, rows))
        # Padded on the left, so that every row's answer starts at the same position.
        inputs = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        # Versions of transformers disagree on whether it is typed.
        output = untyped.generate(
            inputs.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=ANSWER_LIMIT,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=padding,
        )
        answers += [tokenizer.decode(row) for row in output[:, width:].tolist()]
    return answers


def count_right(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str], questions: list[Question]
) -> tuple[int, list[str]]:
    """The number of answers with the right signature, and a line for each other answer."""
    answers = generate(model, tokenizer, prompts)
    wrong = [
        f"{question.question} wanted `{question.signature}` but got {answer.strip()[:160]}"
        for question, answer in zip(questions, answers, strict=True)
        if not answer.lstrip("\n").startswith(f"`{question.signature}`")
    ]
    return len(questions) - len(wrong), wrong


@torch.inference_mode()
def source_loss(model: LlamaForCausalLM, tokenizer: Tokenizer) -> tuple[float, float]:
    """The loss over the held-out source, in nats per token and in bits per byte."""
    total, tokens, size = 0.0, 0, 0
    for _, text in held_out_files():
        ids = tokenizer.encode(text).ids
        size += len(text.encode())
        for start in range(0, len(ids) - 1, WINDOW):
            window = torch.tensor([ids[start : start + WINDOW + 1]], device=model.device)
            logits = model(window[:, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(
                logits, window[0, 1:], reduction="sum"
            ).item()
            tokens += window.shape[1] - 1
    return total / tokens, total / size / math.log(2)


@torch.inference_mode()
def answer_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, exchanges: list[Exchange]) -> float:
    """The loss over completions, in nats per token."""
    total, tokens = 0.0, 0
    for exchange in exchanges:
        prompt = tokenizer.encode(exchange.prompt).ids
        completion = tokenizer.encode(exchange.completion).ids
        inputs = torch.tensor([prompt + completion[:-1]], device=model.device)
        logits = model(inputs).logits[0, len(prompt) - 1 :].float()
        target = torch.tensor(completion, device=model.device)
        total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
        tokens += len(completion)
    return total / tokens


def unseen_exchanges(entries: list[Entry], questions: list[Question]) -> list[Exchange]:
    """The names of the fixed questions, in wordings that the training does not have."""
    by_name = {entry.name: entry for entry in entries}
    return [
        chat_exchange(
            UNSEEN_QUESTIONS[index % len(UNSEEN_QUESTIONS)].format(name=question.name),
            by_name[question.name].answer,
        )
        for index, question in enumerate(questions)
        if question.name in by_name
    ]


def evaluate(folder: Path) -> dict[str, Any]:
    """Every figure of the checkpoint in `folder`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.eval()  # type: ignore[no-untyped-call]
    model.to(device)  # type: ignore[arg-type]
    entries, questions = build_entries(), read_questions()
    chat = [chat_exchange(question.question, "").prompt for question in questions]
    raw = [raw_exchange(question.question, "").prompt for question in questions]
    chat_right, chat_wrong = count_right(model, tokenizer, chat, questions)
    raw_right, raw_wrong = count_right(model, tokenizer, raw, questions)
    for line in chat_wrong + raw_wrong:
        print(line)
    unseen = unseen_exchanges(entries, questions)
    unseen_right, _ = count_right(
        model, tokenizer, [exchange.prompt for exchange in unseen], questions
    )
    nats, bits = source_loss(model, tokenizer)
    return {
        "questions": len(questions),
        "right_signature_chat": chat_right,
        "right_signature_raw": raw_right,
        "right_signature_unseen_wording": unseen_right,
        "held_out_source_loss": round(nats, 4),
        "held_out_source_bits_per_byte": round(bits, 4),
        "unseen_wording_answer_loss": round(answer_loss(model, tokenizer, unseen), 4),
        "parameters": model.num_parameters(),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".md"),
    }


def main() -> None:
    """Read the command line, evaluate, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--result", type=Path, default=DEFAULT_RESULT)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write-questions", action="store_true", help="choose them anew, and end")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.write_questions:
        write_questions(draw_questions(build_entries()))
        return
    result = json.loads(arguments.result.read_text("utf-8")) if arguments.result.exists() else {}
    result["evaluation"] = evaluate(arguments.model)
    arguments.result.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
