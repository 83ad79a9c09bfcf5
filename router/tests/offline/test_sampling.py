import pytest
import text_generation_router
from text_generation_router.offline import SamplingParams
from text_generation_router.request import Grammar


def test_defaults_are_those_of_vllm():
    asked = SamplingParams().to_parameters()
    assert asked.do_sample and asked.temperature == 1.0
    assert asked.max_new_tokens == 16
    assert asked.top_k is None and asked.top_p is None and asked.seed is None
    assert asked.stop == () and asked.grammar is None and not asked.keeps_stop_sequence


def test_everything_arrives():
    params = SamplingParams(
        max_tokens=None,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        typical_p=0.8,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={7: -100.0},
        seed=5,
        stop=("a", "b"),
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_p=0.05,
        stop_token_ids=[9, 7, 9],
        logprobs=4,
        prompt_logprobs=True,
        deterministic=True,
        regex="a+",
    )
    asked = params.to_parameters()
    assert asked.max_new_tokens is None
    assert asked.min_new_tokens == 3
    assert asked.temperature == 0.5
    assert asked.top_p == pytest.approx(0.9) and asked.typical_p == pytest.approx(0.8)
    assert asked.top_k == 40
    assert (asked.repetition_penalty, asked.frequency_penalty) == (1.25, 0.5)
    assert asked.presence_penalty == -0.5
    assert asked.logit_bias == ((7, -100.0),)
    assert asked.seed == 5
    assert asked.stop == ("a", "b")
    assert asked.min_p == pytest.approx(0.05) and asked.stop_token_ids == (9, 7)
    assert asked.num_unstopped_tokens == 3
    assert asked.includes_stop and asked.ignore_eos_token and asked.decoder_input_details
    assert asked.top_n_tokens == 4
    assert asked.deterministic
    assert asked.grammar == Grammar("regex", "a+")


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_p": 0.0}])
def test_greedy(greedy):
    asked = SamplingParams(**greedy, top_k=5, min_p=0.1).to_parameters()
    assert not asked.wants_sampling


@pytest.mark.parametrize(
    "given, kind, source",
    [
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"json_schema": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"lark": "start: /a/"}, "lark", "start: /a/"),
    ],
)
def test_grammars(given, kind, source):
    assert SamplingParams(**given).to_parameters().grammar == Grammar(kind, source)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"temperature": -1.0}, "`temperature`: Input should be greater than or equal to 0"),
        ({"max_tokens": -1}, "`max_tokens`"),
        ({"n": 0}, "`n`"),
        ({"top_k": 2**40}, "`top_k`"),
        ({"seed": 2**70}, "`seed`"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"stop": [1]}, "`stop"),
        ({"stop_token_ids": 5}, "`stop_token_ids`"),
        ({"logit_bias": [(1, 1.0)]}, "`logit_bias`"),
        ({"logit_bias": {-1: 1.0}}, "`logit_bias`: Input should be greater"),
        ({"ignore_eos": 1}, "`ignore_eos`"),
        ({"regex": "a", "lark": "b"}, "exclude each other"),
    ],
)
def test_an_invalid_value_is_one_sentence(given, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        SamplingParams(**given)
    assert "\n" not in str(caught.value)


def test_the_package_has_the_offline_names_and_no_others():
    assert text_generation_router.SamplingParams is SamplingParams
    assert text_generation_router.LLM.__name__ == "LLM"
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = text_generation_router.Llm
