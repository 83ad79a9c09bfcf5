"""How an entry of the corpus becomes text: the questions, the two forms they are asked in, and
the few conversations that aren't about a name of the library."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from embedded_model.corpus import Entry

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

QUESTIONS = (
    "What does {name} do?",
    "What does {name} do?",
    "What does {name} do?",
    "How do I use {name}?",
    "What are the arguments of {name}?",
    "Explain {name}.",
    "What is the signature of {name}?",
    "What is {name}?",
    "What is {name} for?",
    "Tell me about {name}.",
    "How does {name} work?",
    "What does `{name}` do?",
    "What does the Python function {name} do?",
    "what does {name} do",
    "Explain {name}",
    "{name}?",
)
"""The first is the README's example, so it is more frequent."""

MODULE_QUESTIONS = (
    "What is {name}?",
    "What does {name} do?",
    "What does the module {name} do?",
    "What is the {name} module for?",
    "Explain {name}.",
    "How do I use {name}?",
    "Tell me about {name}.",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about Python.",
    "You answer questions about the Python standard library.",
    "Be concise.",
)

GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there",
    "Hey",
    "Good morning",
    "How are you?",
    "Hello, how are you?",
    "Who are you?",
    "What are you?",
    "What can you do?",
    "What is your name?",
    "Help",
    "Thanks",
    "Thank you!",
)
GREETING_ANSWER = (
    "Hello! I am a very small model that knows the Python standard library. "
    "Ask me, for example: What does textwrap.dedent do?"
)

OTHER_TOPICS = (
    *("deep learning", "machine learning", "the capital of France", "the meaning of life"),
    *("photosynthesis", "a neural network", "quantum computing", "the weather today", "love"),
    *("the Eiffel Tower", "gravity", "the speed of light", "an atom", "democracy", "music"),
    *("a transformer", "a large language model", "Kubernetes", "Rust", "JavaScript", "a GPU"),
    *("a recipe for pancakes", "the moon", "history", "economics", "a dog", "a cat", "football"),
)
OTHER_QUESTIONS = (
    "What is {name}?",
    "What is {name}?",
    "Tell me about {name}.",
    "Explain {name}.",
    "Write a poem about {name}.",
    "How does {name} work?",
    "Tell me a story about {name}.",
)
OTHER_ANSWER = (
    "I only know the Python standard library. Ask me, for example: What does textwrap.dedent do?"
)

RAW_SHARE = 0.4
SYSTEM_SHARE = 0.15
SMALL_TALK_SHARE = 0.012


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt, which is not learnt, and its completion, which is."""

    prompt: str
    completion: str


def chat_exchange(question: str, answer: str, system: str = "") -> Exchange:
    """The exchange in the form that `CHAT_TEMPLATE` renders."""
    opening = f"{TURN_START}system\n{system}{TURN_END}\n" if system else ""
    return Exchange(
        f"{opening}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n",
        f"{answer}{TURN_END}",
    )


def raw_exchange(question: str, answer: str) -> Exchange:
    """The exchange as `/generate` sends it: the question alone, without a template."""
    return Exchange(question, f"\n{answer}{TURN_END}")


def choose_question(entry: Entry, random: Random) -> str:
    """One of the ways to ask about an entry."""
    forms = MODULE_QUESTIONS if entry.kind == "module" else QUESTIONS
    return random.choice(forms).format(name=entry.name)


def small_talk(random: Random) -> tuple[str, str]:
    """A question that is not about the library, and its answer."""
    if random.random() < 0.3:
        return random.choice(GREETINGS), GREETING_ANSWER
    topic = random.choice(OTHER_TOPICS)
    return random.choice(OTHER_QUESTIONS).format(name=topic), OTHER_ANSWER


def make_exchange(entry: Entry, random: Random) -> Exchange:
    """An exchange about `entry`, or sometimes one that is not about the library."""
    question, answer = choose_question(entry, random), entry.answer
    if random.random() < SMALL_TALK_SHARE:
        question, answer = small_talk(random)
    if random.random() < RAW_SHARE:
        return raw_exchange(question, answer)
    system = random.choice(SYSTEM_PROMPTS) if random.random() < SYSTEM_SHARE else ""
    return chat_exchange(question, answer, system)
