"""`text-generation`, TGI's own client."""

import text_generation
from checks import ANSWER, API_KEY, QUESTION, URL, USER, check, equal, raised, run
from text_generation.errors import ValidationError

HEADERS = {"Authorization": f"Bearer {API_KEY}"}
client = text_generation.Client(URL, headers=HEADERS, timeout=60)
async_client = text_generation.AsyncClient(URL, headers=HEADERS, timeout=60)


@check
def generate() -> None:
    answer = client.generate(QUESTION, max_new_tokens=40, top_n_tokens=2)
    equal(answer.generated_text.strip(), ANSWER)
    equal(answer.details.finish_reason, "eos_token")
    equal(len(answer.details.top_tokens), answer.details.generated_tokens)
    whole = "".join(token.text for token in answer.details.tokens if not token.special)
    equal(whole, answer.generated_text)


@check
def generate_with_the_prompt() -> None:
    answer = client.generate(
        QUESTION, max_new_tokens=3, return_full_text=True, decoder_input_details=True
    )
    assert answer.generated_text.startswith(QUESTION)
    equal("".join(token.text for token in answer.details.prefill), QUESTION)


@check
def generate_with_a_stop_string() -> None:
    answer = client.generate(QUESTION, max_new_tokens=20, stop_sequences=["dedent"])
    equal(answer.generated_text, "\n`dedent")
    equal(answer.details.finish_reason, "stop_sequence")


@check
def generate_stream() -> None:
    responses = list(client.generate_stream(QUESTION, max_new_tokens=40))
    text = "".join(one.token.text for one in responses if not one.token.special)
    equal(text, responses[-1].generated_text)
    equal(text.strip(), ANSWER)
    equal(responses[-1].details.finish_reason, "eos_token")


@check
def samples() -> None:
    best = client.generate(QUESTION, max_new_tokens=8, do_sample=True, best_of=2)
    equal(len(best.details.best_of_sequences), 1)
    seeded = [
        client.generate(QUESTION, do_sample=True, seed=5, temperature=1.5, max_new_tokens=8)
        for _ in range(2)
    ]
    equal(seeded[0].generated_text, seeded[1].generated_text)
    equal(seeded[0].details.seed, 5)


@check
def grammar() -> None:
    regex = {"type": text_generation.types.GrammarType.Regex, "value": "[0-9]{3}-[0-9]{2}"}
    answer = client.generate(QUESTION, max_new_tokens=20, grammar=regex)
    equal([len(part) for part in answer.generated_text.split("-")], [3, 2])


@check
def errors() -> None:
    error = raised(ValidationError, lambda: client.generate(QUESTION, max_new_tokens=100_000))
    assert str(error).startswith("Input validation error: "), error
    raised(ValidationError, lambda: list(client.generate_stream(QUESTION, max_new_tokens=100_000)))


@check
def chat() -> None:
    # Not streamed: this version can read the chunks of no server, TGI's included.
    answer = client.chat(messages=USER, max_tokens=40, temperature=0.0)
    equal(answer.choices[0].message.content, ANSWER)


@check
async def asynchronous() -> None:
    answer = await async_client.generate(QUESTION, max_new_tokens=40)
    equal(answer.generated_text.strip(), ANSWER)
    text = ""
    async for response in async_client.generate_stream(QUESTION, max_new_tokens=40):
        text += "" if response.token.special else response.token.text
    equal(text, answer.generated_text)


run()
